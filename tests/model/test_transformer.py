"""The whole model: what may influence what, how it starts, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clockhand.errors import ClockhandError
from clockhand.model import attention as attention_module
from clockhand.model.attend import Visibility, attend_reference
from clockhand.model.transformer import Block, Transformer, positions_in_documents, positions_of_padded
from clockhand.presets import build

# Sums over another number of rows or keys round differently. Logits are of size 10, controls differ by more than 0.1.
close = dict(rtol=1e-4, atol=1e-4)


def changed_after(ids: Tensor, t: int) -> Tensor:
    """`ids` with every token beyond position t another one."""
    other = ids.clone()
    other[:, t + 1 :] = (other[:, t + 1 :] + 1) % 37
    return other


def norm_of_difference(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference at each position, (T,)."""
    return (a - b).detach().abs().amax((0, 2))


# ── causality ──────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(2, 24), data=st.data(), seed=st.integers(0, 99))
def test_future_tokens_cannot_change_past_logits_by_one_bit(make_model, make_ids, kind, tokens, data, seed):
    model, ids = make_model(**kind), make_ids(2, tokens, seed)
    t = data.draw(st.integers(0, tokens - 2))
    before, after = model(ids).logits, model(changed_after(ids, t)).logits
    if model.config.is_moe:
        # Other tokens at an expert make its matrix product one of another size, which may round differently.
        torch.testing.assert_close(after[:, : t + 1], before[:, : t + 1], **close)
    else:
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
    assert norm_of_difference(after, before)[t + 1 :].max() > 0.1


def test_without_the_rule_the_future_would_show(make_model, make_ids, monkeypatch):
    """Control of the test above: it notices an attention that sees everything."""

    def sees_all(q: Tensor, k: Tensor, v: Tensor, sees: Visibility) -> Tensor:
        return attend_reference(q, k, v, Visibility(torch.full_like(sees.query_positions, 99), sees.key_positions))

    model, ids = make_model(), make_ids(2, 8)
    monkeypatch.setattr(attention_module, "attend", sees_all)
    before, after = model(ids).logits, model(changed_after(ids, 4)).logits
    assert norm_of_difference(after, before)[:5].min() > 0.1


def test_a_sliding_window_of_one_layer_forgets_what_has_left_it(make_model, make_ids):
    model, ids = make_model(sliding_window=3, n_layers=1), make_ids(1, 8)
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 37
    differs = norm_of_difference(model(ids).logits, model(other).logits) > 0
    assert differs.tolist() == [True, True, True, False, False, False, False, False]


# ── positions ──────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(9)))
def test_what_counts_is_the_position_of_a_token_not_its_place_in_the_call(make_model, make_ids, kind, order):
    model, ids, order = make_model(**kind), make_ids(2, 9), list(order)
    shuffled = model(ids[:, order], positions=torch.tensor(order).expand(2, 9)).logits
    torch.testing.assert_close(shuffled, model(ids).logits[:, order], **close)


@pytest.mark.parametrize("shift", [10, 30_000])
def test_moving_all_positions_changes_nothing_under_rope(make_model, make_ids, shift):
    model, ids = make_model().double(), make_ids(2, 9)
    positions = torch.arange(9).expand(2, 9)
    moved = model(ids, positions=positions + shift).logits
    # Tables are fp32, also in a float64 model: 6e-8 an entry, times the size of the logits.
    torch.testing.assert_close(moved, model(ids).logits, rtol=0, atol=1e-4)
    assert norm_of_difference(model(ids, positions=2 * positions).logits, moved)[1:].min() > 0.01  # control


def last_logits_with_the_context_reversed(model: Transformer, ids: Tensor) -> tuple[Tensor, Tensor]:
    reversed_context = torch.cat((ids[:, :-1].flip(1), ids[:, -1:]), dim=1)
    return model(ids).logits[:, -1], model(reversed_context).logits[:, -1]


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(7)))
def test_without_positions_one_layer_cannot_tell_orders_apart(make_model, make_ids, order):
    model, ids = make_model(position="none", n_layers=1), make_ids(2, 8)
    shuffled = torch.cat((ids[:, list(order)], ids[:, -1:]), dim=1)
    torch.testing.assert_close(model(shuffled).logits[:, -1], model(ids).logits[:, -1], **close)


@pytest.mark.parametrize("changes", [dict(n_layers=1), dict(n_layers=1, position="learned"), dict(position="none")])
def test_rope_a_table_or_a_second_causal_layer_tell_orders_apart(make_model, make_ids, changes):
    """The controls of claim A06: with a causal mask it needs one layer."""
    plain, reversed_ = last_logits_with_the_context_reversed(make_model(**changes), make_ids(2, 8))
    assert (plain - reversed_).abs().max() > 0.1


def test_rope_computes_positions_beyond_max_seq_len_and_a_learned_table_refuses_them(make_model, make_ids):
    assert make_model(max_seq_len=8)(make_ids(1, 9)).logits.isfinite().all()  # claim A07
    learned = make_model(max_seq_len=8, position="learned")
    learned(make_ids(1, 8))
    with pytest.raises(ClockhandError, match="position 8 is beyond the learned table of max_seq_len = 8 rows"):
        learned(make_ids(1, 9))
    with pytest.raises(ClockhandError, match="position 50 is beyond"):
        learned(make_ids(1, 1), positions=torch.tensor([[50]]))


# ── padding and packing ────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=10, deadline=None)
@given(data=st.data(), tokens=st.integers(1, 12))
def test_a_padded_row_equals_the_row_alone_wherever_its_padding_is(make_model, make_ids, kind, data, tokens):
    model, ids = make_model(**kind), make_ids(3, tokens)
    is_token = torch.tensor(data.draw(st.lists(st.booleans(), min_size=3 * tokens, max_size=3 * tokens))).view(3, -1)
    positions = positions_of_padded(is_token)
    out = model(ids, positions=positions)
    assert out.logits.isfinite().all()
    for row in range(3):
        if is_token[row].any():
            alone = model(ids[row][is_token[row]][None]).logits[0]
            torch.testing.assert_close(out.logits[row][is_token[row]], alone, **close)
    # What stands at the padding does not matter, not by one bit.
    other = ids.where(is_token, (ids + 1) % 37)
    again = model(other, positions=positions)
    assert torch.equal(again.logits[is_token], out.logits[is_token])
    assert torch.equal(again.balance_loss, out.balance_loss)


def test_padding_taken_for_tokens_would_show(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 6)
    assert norm_of_difference(model(ids).logits[:, 2:], model(ids[:, 2:]).logits).min() > 0.1


def test_padding_sends_no_gradient(make_model, make_ids, kind):
    model = make_model(**kind)
    ids = torch.tensor([[36, 36, 1, 2, 3]])
    is_token = ids != 36
    out = model(ids, positions=positions_of_padded(is_token))
    (out.logits[is_token].square().sum() + out.balance_loss).backward()
    alone = make_model(**kind)
    out = alone(ids[:, 2:])
    (out.logits.square().sum() + out.balance_loss).backward()
    for (name, padded), single in zip(model.named_parameters(), alone.parameters()):
        scale = float(single.grad.abs().max())
        torch.testing.assert_close(padded.grad, single.grad, rtol=0, atol=1e-4 * (1 + scale), msg=name)


@st.composite
def packings(draw) -> list[int]:
    return draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))


@settings(max_examples=12, deadline=None)
@given(lengths=packings(), few_names=st.booleans())
def test_packed_documents_equal_each_document_alone(make_model, make_ids, kind, lengths, few_names):
    """Also when the id of a document comes back later in the row: it once saw its namesake, and so its own future."""
    model, ids = make_model(**kind), make_ids(1, sum(lengths))
    names = [number % 2 if few_names else 10 - number for number in range(len(lengths))]
    documents = torch.tensor([[name for name, length in zip(names, lengths) for _ in range(length)]])
    packed = model(ids, documents=documents).logits
    alone = torch.cat([model(piece).logits for piece in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, **close)
    if len(lengths) > 1:  # control: without the boundaries
        assert norm_of_difference(model(ids).logits, alone)[lengths[0] :].max() > 0.1


def test_rows_are_packed_independently(make_model, make_ids):
    model, ids = make_model(), make_ids(2, 6)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1], [5, 5, 5, 5, 5, 2]])
    packed = model(ids, documents=documents).logits
    for row in range(2):
        torch.testing.assert_close(
            packed[row], model(ids[row, None], documents=documents[row, None]).logits[0], **close
        )


def test_documents_with_given_positions_may_be_interleaved(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 6)
    documents, positions = torch.tensor([[0, 1, 0, 1, 0, 1]]), torch.tensor([[0, 0, 1, 1, 2, 2]])
    mixed = model(ids, documents=documents, positions=positions).logits
    for start in (0, 1):
        torch.testing.assert_close(mixed[:, start::2], model(ids[:, start::2]).logits, **close)


def test_documents_are_apart_even_where_positions_count_through_them(make_model, make_ids):
    model, ids = make_model(), make_ids(1, 7)
    documents, positions = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), torch.arange(7)[None]
    packed = model(ids, documents=documents, positions=positions).logits
    torch.testing.assert_close(packed[:, 3:], model(ids[:, 3:]).logits, **close)


def test_positions_restart_with_each_document_and_skip_padding():
    documents = torch.tensor([[3, 3, 3, 1, 1, 9], [0, 1, 1, 1, 1, 1]])
    assert positions_in_documents(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0]])
    assert positions_of_padded(mask).tolist() == [[-1, -1, 0, 1], [0, 1, -1, 2], [-1, -1, -1, -1]]


def test_documents_longer_together_than_the_learned_table_are_no_reason_to_refuse(make_model, make_ids):
    model, ids = make_model(position="learned", max_seq_len=4), make_ids(1, 8)
    packed = model(ids, documents=torch.tensor([[0] * 4 + [1] * 4])).logits
    torch.testing.assert_close(packed[:, 4:], model(ids[:, 4:]).logits, **close)


# ── parts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_a_block_is_its_equation(make_model, residual, norm_position):
    model = make_model(norm_position=norm_position, residual=residual, position="none")
    block, x = model.blocks[0], torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5).expand(2, 5)
    sees = Visibility(positions, positions)

    def attend(x: Tensor) -> Tensor:
        return block.attention(x, None, sees)

    keep = 1.0 if residual else 0.0
    if norm_position == "pre":
        expected = keep * x + attend(block.attention_norm(x))
        expected = keep * expected + block.mlp(block.mlp_norm(expected))
    else:
        expected = block.attention_norm(keep * x + attend(x))
        expected = block.mlp_norm(keep * expected + block.mlp(expected))
    out, balance = block(x, None, sees, None, None, 0)
    torch.testing.assert_close(out, expected)
    assert balance == 0


def test_the_final_norm_stands_before_the_head_unless_each_block_ends_in_one(make_model):
    assert "final_norm.weight" in make_model().state_dict()
    assert not any(name.startswith("final_norm") for name in make_model(norm_position="post").state_dict())


def test_hidden_states_through_the_head_are_the_logits(make_model, make_ids, kind):
    model, ids = make_model(**kind), make_ids(2, 5)
    out, (hidden, balance) = model(ids), model.hidden(ids)
    assert hidden.shape == (2, 5, 24)
    assert torch.equal(model.lm_head(hidden), out.logits)
    assert torch.equal(balance, out.balance_loss)


def test_tied_weights_are_one_parameter_with_one_gradient(make_model, make_ids):
    tied, untied = make_model(), make_model(tie_embeddings=False)
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert {"lm_head.weight", "token_embedding.weight"} <= set(tied.state_dict())
    untied.load_state_dict(tied.state_dict())
    ids = make_ids(2, 5)
    for model in (tied, untied):
        model(ids).logits.square().mean().backward()
    both = untied.token_embedding.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.token_embedding.weight.grad, both, **close)


def test_a_gradient_flows_to_every_parameter(make_model, make_ids, kind):
    model = make_model(**kind)
    out = model(make_ids(4, 16))
    (out.logits.square().mean() + out.balance_loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name != "position_embedding.weight":  # only 16 of its 64 rows are visited
            rows = parameter.grad.flatten(1).any(1) if parameter.dim() > 1 else parameter.grad != 0
            assert rows.float().mean() > 0.5, name


def test_dropout_acts_in_training_only(make_model, make_ids):
    model, plain, ids = make_model(dropout=0.3), make_model(), make_ids(2, 6)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    model.train()
    calls = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda *_: calls.append(1))
    model(ids)
    assert len(calls) == 1 + 2 * 2  # after the embedding, and after the attention and the MLP of two layers
    torch.manual_seed(0)
    first, second = model(ids).logits, model(ids).logits
    assert not torch.allclose(first, second, atol=0.1)
    torch.manual_seed(0)
    assert torch.equal(model(ids).logits, first)


def test_the_balance_loss_is_the_coefficient_times_the_sum_over_layers(make_model, make_ids):
    ids = make_ids(3, 7)
    model = make_model(n_experts=4, n_experts_per_token=2, balance_coef=0.25, n_layers=3)
    seen = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda _module, _arguments, out: seen.append(out[1]))
    balance = model(ids).balance_loss
    assert len(seen) == 3
    torch.testing.assert_close(balance, 0.25 * sum(seen))
    assert balance.dtype == torch.float32
    dense = make_model()(ids).balance_loss
    assert dense == 0
    assert dense.dtype == torch.float32


def test_one_mha_block_from_primitives_has_the_parameters_of_the_exercise():
    """Claim B17: width 256, 4 heads, hidden 1024, batch 2, length 128."""
    config = build("tiny", d_model=256, n_heads=4, n_kv_heads=4, d_ff=1024)
    block, positions = Block(config), torch.arange(128).expand(2, 128)
    out, _ = block(torch.randn(2, 128, 256), None, Visibility(positions, positions), None, None, 0)
    assert out.shape == (2, 128, 256)
    assert sum(parameter.numel() for parameter in block.parameters()) == 1_049_088


@pytest.mark.parametrize("preset", ["mini-llama", "minimind-3", "minimind-3-moe", "minimind-3-textbook"])
def test_the_models_of_the_course_have_exactly_their_parameters(preset):
    expected = {
        "mini-llama": 35_926_528,
        "minimind-3": 63_912_192,
        "minimind-3-moe": 198_416_640,
        "minimind-3-textbook": 75_707_136,
    }
    with torch.device("meta"):
        model = Transformer(build(preset))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected[preset]


# ── initial values ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("changes", [dict(), dict(n_experts=2), dict(mlp="gelu", mlp_bias=True, attention_bias="all")])
def test_initial_weights_have_the_spread_the_config_says_and_residual_projections_less(changes):
    torch.manual_seed(0)
    config = build("tiny", n_layers=8, norm="layer", position="learned", tie_embeddings=False, **changes)
    for name, parameter in Transformer(config).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            expected = 0.02 / math.sqrt(2 * 8) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            # The deviation of n samples is itself off by 1/√(2n) of it; the mean by 1/√n. Five times that is 1 in 10⁶.
            assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), name
            assert abs(float(parameter.detach().mean())) < 5 * expected / math.sqrt(parameter.numel()), name


def test_another_spread_is_honoured():
    weight = Transformer(build("tiny", init_std=0.1)).token_embedding.weight
    assert weight.std().item() == pytest.approx(0.1, rel=0.02)


def test_a_seed_gives_the_same_model_again(make_config):
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in Transformer(make_config(n_experts=2)).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_new_model_finds_all_ids_about_equally_likely():
    torch.manual_seed(0)
    model = Transformer(build("tiny", vocab_size=4096, tie_embeddings=False))
    ids = torch.randint(0, 4096, (4, 64))
    loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    # ln 4096 = 8.3178 (claim A26), and half the variance of a logit above it: 192 · 0.02² / 2 = 0.04.
    assert float(loss.detach()) == pytest.approx(math.log(4096), abs=0.1)


# ── types and shapes ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_smallest_model_there_can_be_runs():
    config = build("tiny", vocab_size=1, d_model=2, n_layers=1, n_heads=1, n_kv_heads=1, d_ff=1, max_seq_len=1)
    assert Transformer(config)(torch.zeros(1, 1, dtype=torch.int64)).logits.shape == (1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_any_type_answers_in_it_and_near_the_fp32_one(make_model, make_ids, kind, dtype):
    if kind.get("n_experts"):
        kind = dict(kind, n_experts_per_token=4)  # rounding may choose another expert; all of them are always chosen
    ids = make_ids(2, 9)
    expected = make_model(**kind)(ids).logits
    out = make_model(**kind).to(dtype)(ids)
    assert out.logits.dtype == dtype
    assert out.balance_loss.dtype == torch.float32
    # bf16 has 8 bits, fp16 11, and weights of 0.3 make many layers of rounding count.
    tolerance = {torch.bfloat16: 0.15, torch.float16: 0.02, torch.float64: 1e-4}[dtype]
    assert norm_of_difference(out.logits.float(), expected).max() < tolerance * expected.abs().max()


def test_autocast_runs_every_kind_forward_and_backward(make_model, make_ids, kind):
    model, ids = make_model(**kind), make_ids(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids)
    (out.logits.float().mean() + out.balance_loss).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_ids_may_be_int32_or_strided(make_model, make_ids):
    model, ids = make_model(), make_ids(6, 4)
    expected = model(ids).logits
    assert torch.equal(model(ids.int()).logits, expected)
    assert torch.equal(model(ids.T.contiguous().T).logits, expected)


def test_a_compiled_forward_equals_the_plain_one(make_model, make_ids):
    model, ids = make_model(n_experts=3), make_ids(2, 9)
    compiled = torch.compile(model, backend="eager")  # what is captured; what inductor makes of it is its own affair
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits, **close)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(), dict(sliding_window=3), dict(n_experts=3, n_experts_per_token=2)])
def test_a_model_compiled_by_inductor_equals_the_plain_one(make_model, make_ids, changes):
    model, ids = make_model(**changes), make_ids(2, 9)
    torch.testing.assert_close(torch.compile(model)(ids).logits, model(ids).logits, **close)


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────

ZEROS = torch.zeros(2, 3, dtype=torch.int64)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an id beyond": (dict(ids=ZEROS + 37), r"id 37 is outside the vocabulary of 37 ids \(0 to 36\)"),
    "an id below": (dict(ids=ZEROS - 4), r"id -4 is outside the vocabulary of 37 ids"),
    "one dimension": (dict(ids=ZEROS[0]), r"ids must have shape \(batch, tokens\), at least 1 of each, not \(3,\)"),
    "no tokens": (dict(ids=ZEROS[:, :0]), r"at least 1 of each, not \(2, 0\)"),
    "no rows": (dict(ids=ZEROS[:0]), r"at least 1 of each, not \(0, 3\)"),
    "fractions": (dict(ids=ZEROS.float()), "ids must be int64 or int32, not torch.float32"),
    "bytes": (dict(ids=ZEROS.byte()), "ids must be int64 or int32, not torch.uint8"),
    "positions of another shape": (
        dict(ids=ZEROS, positions=ZEROS[:1]),
        r"positions has shape \(1, 3\) but ids have \(2, 3\)",
    ),
    "fractional positions": (dict(ids=ZEROS, positions=ZEROS.float()), "positions must be int64 or int32"),
    "documents of another shape": (
        dict(ids=ZEROS, documents=ZEROS[:, :2]),
        r"documents has shape \(2, 2\) but ids have \(2, 3\)",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_input_that_cannot_be_honoured_is_refused_in_one_line(make_model, arguments, message):
    with pytest.raises(ClockhandError, match=message) as refusal:
        make_model()(**arguments)
    assert "\n" not in str(refusal.value)
