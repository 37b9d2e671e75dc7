"""The KV cache: whatever the split, the padding or the order of calls, it is as if there were no cache.

Cached and uncached sums run over another number of keys, so they differ in fp32 rounding: logits here are of size 10,
and 1e-4 is a hundred times their last place. The control at the end differs by more than 0.1.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clockhand.errors import ClockhandError
from clockhand.model import cache as cache_module
from clockhand.model.attend import Visibility
from clockhand.model.cache import KVCache, row_capacity
from clockhand.model.transformer import Transformer, positions_of_padded

close = dict(rtol=1e-4, atol=1e-4)


def in_pieces(model: Transformer, ids: Tensor, sizes: list[int], cache: KVCache) -> Tensor:
    return torch.cat([model(piece, cache=cache).logits for piece in ids.split(sizes, dim=1)], dim=1)


@st.composite
def splits(draw, total: int) -> list[int]:
    """Every way of writing `total` as a sum in order."""
    sizes = []
    while total:
        sizes.append(draw(st.integers(1, total)))
        total -= sizes[-1]
    return sizes


@settings(max_examples=20, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 20))
def test_cached_logits_equal_the_full_forward_for_every_split(make_model, make_ids, kind, data, tokens):
    model, ids = make_model(**kind), make_ids(2, tokens)
    cache = KVCache(model.config, 2, max_seq_len=tokens)  # dynamic scaling adapts to the limit
    sizes = data.draw(splits(tokens))
    torch.testing.assert_close(in_pieces(model, ids, sizes, cache), model(ids).logits, **close)
    assert cache.lengths.tolist() == [tokens, tokens]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_series_of_calls_leaves_every_row_as_if_it_were_alone_and_fresh(make_model, kind, data):
    """Three rows take different numbers of tokens in each call, padded anywhere; sometimes all are cut back, or copied.

    The model of the cache is three lists of ids; after each call the new logits must be those of the list alone.
    """
    model = make_model(**kind)
    limit, cache, held = 40, KVCache(model.config, 3, max_seq_len=40), [[], [], []]
    for _ in range(data.draw(st.integers(1, 5), label="calls")):
        action = data.draw(st.sampled_from(["append", "append", "append", "truncate", "copy"]))
        if action == "truncate":
            length = data.draw(st.integers(0, 12))
            cache.truncate(length)
            held = [row[:length] for row in held]
        if action == "copy":
            abandoned, cache = cache, cache.copy()
            model(torch.zeros(3, 2, dtype=torch.int64), cache=abandoned)  # must not be seen in the copy
        width = data.draw(st.integers(1, 7))
        is_token = torch.tensor(data.draw(st.lists(st.booleans(), min_size=3 * width, max_size=3 * width))).view(3, -1)
        ids = torch.tensor(data.draw(st.lists(st.integers(0, 36), min_size=3 * width, max_size=3 * width))).view(3, -1)
        steps = positions_of_padded(is_token)
        positions = torch.where(is_token, steps + cache.lengths[:, None], -1)
        logits = model(ids, positions=positions, cache=cache).logits
        assert logits.isfinite().all()
        for row in range(3):
            new = ids[row][is_token[row]].tolist()
            held[row] += new
            if new:
                alone = model(torch.tensor([held[row]]), cache=KVCache(model.config, 1, max_seq_len=limit)).logits
                torch.testing.assert_close(logits[row][is_token[row]], alone[0, -len(new) :], **close)
        assert cache.lengths.tolist() == [len(row) for row in held]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_each_row_alone_and_decoding_continues_from_each_end(make_model, make_ids, kind, side):
    model, lengths, steps = make_model(**kind), (9, 4, 1), 6
    ids, more = make_ids(3, 9), make_ids(3, steps, seed=1)
    is_token = torch.arange(9) < torch.tensor(lengths)[:, None]
    if side == "left":
        is_token = is_token.flip(1)
    cache = KVCache(model.config, 3, max_seq_len=9 + steps)
    prompt = model(ids, positions=positions_of_padded(is_token), cache=cache).logits
    decoded = in_pieces(model, more, [1] * steps, cache)
    for row, length in enumerate(lengths):
        whole = torch.cat((ids[row][is_token[row]], more[row]))[None]
        alone = model(whole, cache=KVCache(model.config, 1, max_seq_len=9 + steps)).logits[0]
        torch.testing.assert_close(prompt[row][is_token[row]], alone[:length], **close)
        torch.testing.assert_close(decoded[row], alone[length:], **close)


def test_a_first_call_with_an_empty_cache_is_causal_and_so_are_several_tokens_on_a_warm_one(make_model, make_ids):
    """The trap of claim A22."""
    model, ids = make_model(), make_ids(1, 8)
    other = ids.clone()
    other[:, 4:] = (other[:, 4:] + 1) % 37
    for sizes in ([8], [2, 6]):
        before, after = (in_pieces(model, x, sizes, KVCache(model.config, 1)) for x in (ids, other))
        assert torch.equal(before[:, :4], after[:, :4])
        assert not torch.equal(before[:, 4:], after[:, 4:])


def test_two_continuations_of_one_prefix_do_not_disturb_each_other(make_model, make_ids):
    model, prefix = make_model(), make_ids(1, 5)
    shared = KVCache(model.config, 1)
    model(prefix, cache=shared)
    twin = shared.copy()
    endings = make_ids(1, 4, seed=1), make_ids(1, 4, seed=2)
    results = []
    for step in range(4):  # by turns
        results.append([model(end[:, step : step + 1], cache=c).logits for end, c in zip(endings, (shared, twin))])
    for end, pieces in zip(endings, zip(*results)):
        expected = model(torch.cat((prefix, end), dim=1)).logits[:, 5:]
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **close)
    assert shared.lengths.tolist() == twin.lengths.tolist() == [9]


def test_a_truncated_cache_continues_like_a_fresh_one(make_model, make_ids, kind):
    model, first, second = make_model(**kind), make_ids(2, 10), make_ids(2, 5, seed=1)
    cache, fresh = (KVCache(model.config, 2, max_seq_len=16) for _ in range(2))
    model(first, cache=cache)
    cache.truncate(4)
    model(first[:, :4], cache=fresh)
    torch.testing.assert_close(model(second, cache=cache).logits, model(second, cache=fresh).logits, **close)
    assert cache.lengths.tolist() == [9, 9]


def test_storage_grows_by_doubling_up_to_the_limit_and_nothing_is_lost(make_model, make_ids):
    model, ids = make_model(max_seq_len=300), make_ids(1, 300)
    cache, capacities, pieces = KVCache(model.config, 1), [], []
    assert cache.capacity == 0
    for piece in ids.split(20, dim=1):
        pieces.append(model(piece, cache=cache).logits)
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [64, 128, 256, 300]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids).logits, **close)


def test_bytes_held_are_two_tensors_a_layer(make_model, make_ids):
    model = make_model()  # 2 layers, 2 KV heads of 8
    cache = KVCache(model.config, 3, dtype=torch.bfloat16)
    model(make_ids(3, 5), cache=cache)
    assert cache.nbytes == cache.capacity * 3 * (2 * 2 * 2 * 8) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_model_of_any_type_runs_with_a_cache_of_its_type(make_model, make_ids, dtype):
    model, ids = make_model().to(dtype), make_ids(2, 8)
    cache = KVCache(model.config, 2, dtype=dtype)
    cached, full = in_pieces(model, ids, [3, 1, 4], cache), model(ids).logits
    assert cached.dtype == dtype
    tolerance = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-7}[dtype]  # float64: tables are fp32
    torch.testing.assert_close(cached, full, rtol=0, atol=tolerance * full.abs().max().item())


def test_a_bf16_cache_of_an_fp32_model_loses_only_what_bf16_loses(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 8)
    cached = in_pieces(model, ids, [3, 1, 4], KVCache(model.config, 2, dtype=torch.bfloat16))
    full = model(ids).logits
    assert cached.dtype == torch.float32
    torch.testing.assert_close(cached, full, rtol=0, atol=0.05 * full.abs().max().item())
    assert not torch.allclose(cached, full, atol=1e-5)  # control: it is bf16


def test_a_call_with_a_cache_keeps_no_gradients(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 4)
    assert model(ids).logits.requires_grad
    assert not model(ids, cache=KVCache(model.config, 1)).logits.requires_grad
    assert not model.hidden(ids, cache=KVCache(model.config, 1)).hidden.requires_grad
    assert torch.is_grad_enabled()


def test_a_cache_filled_in_inference_mode_can_be_continued_outside_it(make_model, make_ids):
    """It could not: tensors born in inference mode must not be written to outside it."""
    model, ids = make_model(), make_ids(1, 8)
    cache = KVCache(model.config, 1)
    with torch.inference_mode():
        model(ids[:, :5], cache=cache)
        twin = cache.copy()
    for one in (cache, twin):
        torch.testing.assert_close(model(ids[:, 5:], cache=one).logits, model(ids).logits[:, 5:], **close)


# ── rows, and windows that slide ───────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=40, deadline=None)
@given(data=st.data(), window=st.sampled_from([0, 1, 4]), slack=st.integers(1, 6))
def test_whatever_is_done_to_rows_each_stays_as_if_it_were_alone_and_never_forgot(make_model, data, window, slack):
    """Calls on all rows or one, cuts, copied beginnings, against three lists of ids and a forward without a cache.

    With little slack the ring of a window wraps again and again, grows when a call is wide, and refuses some cuts.
    """
    model, held, widest = make_model(sliding_window=window, max_seq_len=200), [[], [], []], 0
    cache = KVCache(model.config, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "SLACK", slack)
        patch.setattr(cache_module, "_FIRST_CAPACITY", 2)
        for _ in range(data.draw(st.integers(1, 12), label="actions")):
            row = data.draw(st.integers(0, 2))
            view, action = cache.row(row), data.draw(st.sampled_from(["all", "all", "one", "cut", "prefix", "wipe"]))
            length = data.draw(st.integers(max(0, len(held[row]) - 2 * slack), len(held[row])))
            if action == "wipe":
                view.wipe()
                held[row] = []
            elif action == "cut" and view.can_truncate(length):
                view.truncate(length)
                held[row] = held[row][:length]
            elif action == "cut":
                with pytest.raises(ClockhandError, match="are forgotten"):
                    view.truncate(length)
            elif action == "prefix" and view.can_truncate(length):
                target = data.draw(st.integers(0, 2))
                cache.copy_prefix(row, target, length)
                held[target] = held[row][:length]
            width = data.draw(st.integers(1, 9))
            widest = max(widest, width)
            new = [torch.randint(0, 37, (data.draw(st.integers(0, width)),)).tolist() for _ in range(3)]
            if action == "one" or not any(new):
                new = [[] if b != row else [1] * width for b in range(3)]
            ids, positions = torch.zeros(3, width, dtype=torch.int64), torch.full((3, width), -1)
            for b in range(3):
                if new[b]:
                    ids[b, -len(new[b]) :] = torch.tensor(new[b])
                    positions[b, -len(new[b]) :] = torch.arange(len(held[b]), len(held[b]) + len(new[b]))
            if action == "one":
                logits = torch.zeros(3, width, 37)
                logits[row] = model(ids[row : row + 1], cache=view).logits
            else:
                logits = model(ids, positions=positions, cache=cache).logits
            for b in range(3):
                held[b] = held[b] + new[b]
                if new[b]:
                    alone = model(torch.tensor([held[b]])).logits[0, -len(new[b]) :]
                    torch.testing.assert_close(logits[b, -len(new[b]) :], alone, **close)
            assert cache.lengths.tolist() == [len(ids) for ids in held]
            if window:
                assert cache.capacity <= window - 1 + max(widest, slack)


@pytest.mark.parametrize("window", [0, 5])
def test_tokens_appended_to_some_rows_go_where_a_call_would_put_them_and_see_the_same(make_config, window):
    called, appended = (KVCache(make_config(sliding_window=window), 3, 100) for _ in range(2))
    for cache in (called, appended):
        cache.allocate(1)
    for step in range(90):
        rows = torch.tensor([[0, 1, 2], [0, 2], [2]][step % 3])
        expected = torch.full((3, 1), -1)
        expected[rows, 0] = called.lengths[rows]
        sees = Visibility(expected, called.begin(expected), window)
        positions, places, seen = appended.append(rows)
        assert torch.equal(positions, expected[rows, 0])
        assert torch.equal(places, called._where[2])
        assert torch.equal(appended.lengths, called.lengths)
        whole = torch.zeros(len(rows), max(sees.mask.shape[2], seen.shape[1]), dtype=torch.bool)
        by_call, by_append = whole.clone(), whole.clone()
        by_call[:, : sees.mask.shape[2]] = sees.mask[rows, 0]
        by_append[:, : seen.shape[1]] = seen
        assert torch.equal(by_append, by_call)
        assert seen.shape[1] < appended.lengths.max() + 32
    with pytest.raises(ClockhandError, match="at most max_seq_len = 100 tokens a row"):
        for _ in range(40):
            appended.append(torch.tensor([2, 2]))


def test_a_sliding_window_costs_the_same_however_long_the_text(make_model, make_ids):
    model, ids = make_model(sliding_window=5, max_seq_len=2000), make_ids(1, 1000)
    cache = KVCache(model.config, 1)
    pieces = [model(piece, cache=cache).logits for piece in ids.split(100, dim=1)]
    assert cache.capacity == 5 - 1 + 100 == row_capacity(model.config, 2000, call=100)
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids).logits, **close)


def test_what_was_allocated_at_first_is_never_outgrown(make_model, make_ids):
    for window in (0, 5):
        model = make_model(sliding_window=window, max_seq_len=300)
        cache = KVCache(model.config, 2)
        cache.allocate(call=100)
        before = cache.nbytes
        for piece in make_ids(2, 300).split(100, dim=1):
            model(piece, cache=cache)
        assert cache.nbytes == before == 2 * row_capacity(model.config, 300, call=100) * (2 * 2 * 2 * 8) * 4


def test_a_nan_left_behind_would_reach_the_row_s_next_text_but_not_once_it_is_wiped(make_model, make_ids):
    model, ids = make_model(), make_ids(3, 4)
    broken = make_model()
    with torch.no_grad():
        broken.token_embedding.weight[36] = float("nan")
    cache = KVCache(model.config, 3)
    broken(torch.full((3, 4), 36), cache=cache)
    cache.truncate(0)
    cache.row(1).wipe()
    cache.row(2).wipe()
    # Row 2 is longer, so that what lies beyond the ends of the others is handed to attention, masked.
    positions = torch.tensor([[-1, -1, 0, 1], [-1, -1, 0, 1], [0, 1, 2, 3]])
    logits = model(ids, positions=positions, cache=cache).logits
    assert logits[0].isnan().any()  # control: being masked is not enough
    torch.testing.assert_close(logits[1, 2:], model(ids[1:2, 2:]).logits[0], **close)


def test_a_row_may_have_a_limit_of_its_own(make_model, make_ids):
    model = make_model(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=4)
    cache = KVCache(model.config, 2, max_seq_len=60)
    short = cache.row(1, max_seq_len=9)
    torch.testing.assert_close(model(make_ids(1, 9), cache=short).logits, model(make_ids(1, 9)).logits, **close)
    with pytest.raises(ClockhandError, match="at most max_seq_len = 9 tokens a row"):
        model(make_ids(1, 1), cache=short)


def test_rows_and_prefixes_that_are_not_there_are_refused(make_model, make_ids):
    model = make_model(sliding_window=5, max_seq_len=500)
    cache = KVCache(model.config, 2)
    model(make_ids(2, 300), cache=cache)
    model(make_ids(2, 100), cache=cache)
    with pytest.raises(ClockhandError, match="row = 2 must be between 0 and 1"):
        cache.row(2)
    for length in (401, -1, 50):
        with pytest.raises(ClockhandError, match=f"length = {length} is more than row 0 of 400 tokens still holds"):
            cache.copy_prefix(0, 1, length)
    with pytest.raises(ClockhandError, match=r"length = 50 must be 0 or at least 104: .* before 100 are forgotten"):
        cache.truncate(50)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_token_too_many_is_refused_naming_both_numbers_and_the_cache_stays_as_it_was(make_model, make_ids, kind):
    model, ids = make_model(**kind), make_ids(2, 12)
    cache = KVCache(model.config, 2, max_seq_len=8)
    model(ids[:, :6], cache=cache)
    with pytest.raises(ClockhandError, match=r"at most max_seq_len = 8 tokens a row: 6 held and 3 more make 9"):
        model(ids[:, 6:9], cache=cache)
    assert cache.lengths.tolist() == [6, 6]
    fresh = KVCache(model.config, 2, max_seq_len=8)
    torch.testing.assert_close(
        model(ids[:, 6:8], cache=cache).logits, in_pieces(model, ids[:, :8], [6, 2], fresh)[:, 6:], **close
    )


def test_the_refusal_counts_the_row_that_would_outgrow_the_limit(make_model, make_ids):
    model = make_model()
    cache = KVCache(model.config, 2, max_seq_len=8)
    model(make_ids(2, 5), positions=torch.tensor([[0, 1, 2, 3, 4], [-1, -1, -1, 0, 1]]), cache=cache)
    positions = torch.tensor([[-1] * 7, [2, 3, 4, 5, 6, 7, 8]])
    with pytest.raises(ClockhandError, match="2 held and 7 more make 9"):
        model(make_ids(2, 7), positions=positions, cache=cache)


def test_the_limit_is_the_model_s_unless_another_is_given(make_config):
    assert KVCache(make_config(max_seq_len=17), 1).max_seq_len == 17
    assert KVCache(make_config(max_seq_len=17), 1, max_seq_len=1000).max_seq_len == 1000  # RoPE computes them all


def test_a_learned_table_cannot_have_a_longer_cache(make_config):
    with pytest.raises(ClockhandError, match=r"max_seq_len = 65 must not exceed the model's 64"):
        KVCache(make_config(position="learned"), 1, max_seq_len=65)


@pytest.mark.parametrize("wrong", [dict(batch_size=0), dict(batch_size=-1), dict(batch_size=1, max_seq_len=0)])
def test_a_cache_of_no_rows_or_no_tokens_is_refused(make_config, wrong):
    with pytest.raises(ClockhandError, match=r"(batch_size|max_seq_len) = (0|-1) must be at least 1"):
        KVCache(make_config(), **wrong)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a larger batch": (dict(ids=torch.zeros(3, 1, dtype=torch.int64)), "a cache of 2 rows cannot take a batch of 3"),
    "one row": (dict(ids=torch.zeros(1, 1, dtype=torch.int64)), "a cache of 2 rows cannot take a batch of 1"),
    "a gap": (dict(positions=torch.tensor([[5], [4]])), "without a gap or a repeat"),
    "a repeat": (dict(positions=torch.tensor([[3], [4]])), "without a gap or a repeat"),
    "documents": (dict(documents=torch.zeros(2, 1)), "documents cannot be packed into a cache"),
    "ids of no integer type": (dict(ids=torch.zeros(2, 1)), "ids must be int64 or int32, not torch.float32"),
    "ids beyond the vocabulary": (dict(ids=torch.full((2, 1), 37)), "id 37 is outside the vocabulary of 37 ids"),
    "no ids": (dict(ids=torch.zeros(2, 0, dtype=torch.int64)), r"not \(2, 0\)"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_call_leaves_the_cache_as_it_was(make_model, make_ids, arguments, message):
    model = make_model()
    cache = KVCache(model.config, 2)
    model(make_ids(2, 4), cache=cache)
    before = cache.copy()
    with pytest.raises(ClockhandError, match=message):
        model(**{"ids": torch.zeros(2, 1, dtype=torch.int64), **arguments}, cache=cache)
    assert torch.equal(cache.lengths, before.lengths)
    token = make_ids(2, 1, seed=1)
    assert torch.equal(model(token, cache=cache).logits, model(token, cache=before).logits)


def test_a_negative_length_is_refused(make_config):
    with pytest.raises(ClockhandError, match="length = -1 must be 0 or more"):
        KVCache(make_config(), 1).truncate(-1)


# ── control ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_that_forgot_would_show(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 8)
    restarted = torch.cat([model(piece, cache=KVCache(model.config, 2)).logits for piece in ids.split(4, 1)], 1)
    difference = (restarted - model(ids).logits).abs().amax((0, 2))
    assert difference[:4].max() < 1e-4
    assert difference[4:].min() > 0.1


def test_a_cache_of_another_shape_of_model_is_refused_by_the_field_that_differs(make_config, make_model, make_ids):
    cache = KVCache(make_config(n_kv_heads=1), 1)
    with pytest.raises(ClockhandError, match="n_kv_heads = 1, but this model has 2"):
        make_model()(make_ids(1, 3), cache=cache)
