"""The chapters' names give the chapters' models, and where a listing slips, what its text says."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand import course
from clockhand.course import MiniLLaMAConfig, MiniLLaMAForCausalLM, MiniMindModel, ModelArgs
from clockhand.errors import ClockhandError
from clockhand.model.cache import KVCache
from clockhand.presets import build

IDS = torch.tensor([[1, 232, 58, 209, 2, 77, 11]])

SMALL_A = dict(vocab_size=300, d_model=32, n_layers=2, n_q_heads=4, n_kv_heads=2, head_dim=8, d_ffn=48, max_seq_len=32)
SMALL_B = dict(vocab_size=300, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=32)


def mini_llama(**changes: object) -> MiniLLaMAForCausalLM:
    torch.manual_seed(0)
    return MiniLLaMAForCausalLM(MiniLLaMAConfig(**{**SMALL_A, **changes}))


def minimind(**changes: object) -> MiniMindModel:
    torch.manual_seed(0)
    return MiniMindModel(ModelArgs(**{**SMALL_B, **changes}))


BOTH = pytest.mark.parametrize("make", [mini_llama, minimind])


# ── configs ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_default_configs_are_the_courses_presets() -> None:
    assert MiniLLaMAConfig().to_model_config() == build("mini-llama")
    # The chapter turns adjacent pairs; the published weights and the preset turn halves.
    assert ModelArgs().to_model_config() == build("minimind-3-textbook", rope_layout="interleaved")


def test_every_field_reaches_the_model() -> None:
    changes = dict(SMALL_A, rope_theta=500.0, norm_eps=1e-5, tie_word_embeddings=False)
    config = MiniLLaMAConfig(**changes).to_model_config()
    assert (config.vocab_size, config.d_model, config.n_layers, config.n_heads) == (300, 32, 2, 4)
    assert (config.n_kv_heads, config.head_dim, config.d_ff, config.max_seq_len) == (2, 8, 48, 32)
    assert (config.rope_theta, config.norm_eps, config.tie_embeddings) == (500.0, 1e-5, False)
    assert {field.name for field in dataclasses.fields(MiniLLaMAConfig)} == changes.keys()

    changes = dict(SMALL_B, rope_base=500.0, norm_eps=1e-5, num_experts=3)
    config = ModelArgs(**changes).to_model_config()
    assert (config.vocab_size, config.d_model, config.n_layers, config.n_heads) == (300, 32, 2, 4)
    assert (config.n_kv_heads, config.head_dim, config.d_ff, config.max_seq_len) == (2, 8, 48, 32)
    assert (config.rope_theta, config.norm_eps) == (500.0, 1e-5)
    assert (config.n_experts, config.n_experts_per_token) == (3, 1)
    assert {field.name for field in dataclasses.fields(ModelArgs)} == changes.keys()


@pytest.mark.parametrize(
    ("config_type", "changes", "complaint"),
    [
        (MiniLLaMAConfig, dict(n_q_heads=7), "n_kv_heads = 2 must be a divisor of n_q_heads = 7"),
        (MiniLLaMAConfig, dict(head_dim=63), "head_dim = 63 must be even"),
        (MiniLLaMAConfig, dict(head_dim=0), "head_dim = 0 must be at least 1"),
        (MiniLLaMAConfig, dict(n_kv_heads=0), "n_kv_heads = 0 must be at least 1"),
        (MiniLLaMAConfig, dict(d_ffn="wide"), "d_ffn = 'wide' must be of type int"),
        (MiniLLaMAConfig, dict(tie_word_embeddings=1), "tie_word_embeddings = 1 must be of type bool"),
        (ModelArgs, dict(dim=770), "dim = 770 must be a multiple of n_heads = 8"),
        (ModelArgs, dict(hidden_dim=0), "hidden_dim = 0 must be at least 1"),
        (ModelArgs, dict(rope_base=0.5), "rope_base = 0.5 must be above 1"),
        (ModelArgs, dict(num_experts=-1), "num_experts = -1 must be 0 or more"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_the_chapters_words(
    config_type: type, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ClockhandError, match=complaint) as refusal:
        config_type(**changes)
    assert str(refusal.value).endswith(f"(from {config_type.__name__})")


def test_a_field_may_be_set_later_and_is_checked_when_the_model_is_built() -> None:
    args = ModelArgs(**SMALL_B)
    args.n_layers = 1
    assert len(MiniMindModel(args).layers) == 1
    args.n_kv_heads = 3
    with pytest.raises(ClockhandError, match="n_kv_heads = 3 must be a divisor"):
        MiniMindModel(args)
    with pytest.raises(AttributeError, match="n_layer"):
        args.n_layer = 4


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_models_have_the_chapters_parameters() -> None:
    with torch.device("meta"):
        a, b = MiniLLaMAForCausalLM(MiniLLaMAConfig()), MiniMindModel(ModelArgs())
        experts = MiniMindModel(ModelArgs(hidden_dim=2432, num_experts=4))
    assert sum(parameter.numel() for parameter in a.parameters()) == 35_926_528
    assert sum(parameter.numel() for parameter in b.parameters()) == 75_707_136
    # The published 198,416,640 less its q and k norms, which the chapter does not have.
    assert sum(parameter.numel() for parameter in experts.parameters()) == 198_416_640 - 8 * 2 * 96


def test_parts_are_found_under_the_chapters_names() -> None:
    a, b = mini_llama(), minimind()
    assert a.lm_head.weight is a.token_embeddings.weight
    assert b.lm_head.weight is b.embedding.weight
    assert len(a.layers) == len(b.layers) == 2
    assert a.norm.weight.shape == b.norm.weight.shape == (32,)
    assert a.config.n_q_heads == b.args.n_heads == 4


@BOTH
def test_a_call_unpacks_into_logits_loss_and_cache(make) -> None:
    logits, loss, cache = make()(IDS)
    assert logits.shape == (1, 7, 300)
    assert loss is None
    assert cache is None


@BOTH
def test_the_logits_are_those_of_the_transformer_inside(make) -> None:
    model = make()
    torch.testing.assert_close(model(IDS).logits, model.transformer(IDS).logits, rtol=0, atol=0)


@BOTH
def test_the_loss_is_the_mean_surprise_at_each_next_token(make) -> None:
    model = make()
    logits, loss, _ = model(IDS, labels=IDS)
    surprises = [-logits[0, t].log_softmax(-1)[IDS[0, t + 1]] for t in range(6)]
    torch.testing.assert_close(loss, torch.stack(surprises).mean())

    labels = IDS.clone()
    labels[0, :4] = -100
    torch.testing.assert_close(model(IDS, labels=labels).loss, torch.stack(surprises[3:]).mean())


@BOTH
@pytest.mark.parametrize("ids", [IDS[:, :1], IDS])
def test_with_nothing_left_to_learn_the_loss_is_zero_and_so_is_every_gradient(make, ids) -> None:
    model = make()
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0
    assert all(torch.count_nonzero(parameter.grad) == 0 for parameter in model.parameters())


def test_the_balance_loss_is_what_trains_the_router_of_one_expert_a_token() -> None:
    model = minimind(num_experts=4)
    model(IDS, labels=IDS).loss.backward()
    router = model.layers[0].mlp.router.weight
    assert torch.count_nonzero(router.grad) > 0

    router.grad = None
    logits = model(IDS).logits
    F.cross_entropy(logits[0, :-1], IDS[0, 1:]).backward()  # the control: the language-model loss alone
    assert router.grad.abs().max() < 1e-8


@BOTH
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 6), max_size=4))
def test_a_sequence_read_in_any_pieces_gives_the_logits_of_the_whole(make, cuts) -> None:
    # A first piece of several tokens on an empty cache, and several on a warm one: chapter A's own mask lets both
    # see their future.
    model = make()
    ends = [*sorted(set(cuts)), 7]
    cache, start, pieces = [(None, None)] * 2, 0, []
    for end in ends:
        logits, _, cache = model(IDS[:, start:end], past_key_values=cache, start_pos=start)
        pieces.append(logits)
        start = end
    assert isinstance(cache, KVCache)
    assert cache.lengths.tolist() == [7]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(IDS).logits, rtol=1e-4, atol=1e-5)


@BOTH
def test_without_a_cache_start_pos_shifts_the_positions_and_changes_nothing(make) -> None:
    model = make()
    torch.testing.assert_close(model(IDS, start_pos=10).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (dict(start_pos=-1), "start_pos = -1 must be 0 or more"),
        (dict(past_key_values=[]), r"past_key_values must be .* or \[\(None, None\)\] \* 2 to start one"),
        (dict(past_key_values=[(None, None)]), "past_key_values must be"),
        (dict(past_key_values=[(torch.ones(1), torch.ones(1))] * 2), "past_key_values must be"),
        (dict(past_key_values=[(None, None)] * 2, start_pos=3), "start_pos = 3 must be 0, the number of tokens"),
        (dict(labels=IDS[:, 1:]), r"labels have shape \(1, 6\) but ids have \(1, 7\)"),
        (dict(labels=IDS + 300), "label 301 must be -100 or an id from 0 to 299"),
    ],
)
def test_a_call_that_cannot_be_honoured_is_refused(make, arguments, complaint) -> None:
    with pytest.raises(ClockhandError, match=complaint):
        make()(IDS, **arguments)


def test_a_start_pos_that_is_not_the_length_of_the_cache_is_refused() -> None:
    # Left at 0 on a warm cache, the chapter's listing would turn the new token by position 0 and say nothing.
    model = mini_llama()
    cache = model(IDS, past_key_values=[(None, None)] * 2).cache
    with pytest.raises(ClockhandError, match="start_pos = 0 must be 7"):
        model(IDS[:, :1], past_key_values=cache)


def test_a_mask_is_refused_with_the_reason() -> None:
    with pytest.raises(ClockhandError, match="mask must be None: who sees whom is a rule on positions"):
        minimind()(IDS, course.create_causal_mask(7))


# ── building blocks ────────────────────────────────────────────────────────────────────────────────────────────────


def test_rms_norm_gives_the_worked_example() -> None:
    norm = course.RMSNorm(4)
    torch.testing.assert_close(norm(torch.tensor([2.0, -2.0, 2.0, -2.0])), torch.tensor([1.0, -1.0, 1.0, -1.0]))


def test_rotate_half_swaps_the_halves_and_negates_the_second() -> None:
    assert course.rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert course.rotate_half(torch.ones(2, 5, 3, 8)).shape == (2, 5, 3, 8)


def test_the_rotation_tables_are_cos_and_sin_of_position_times_frequency() -> None:
    cos, sin = course.precompute_freqs_cis(64, 1024, 10_000.0)
    assert cos.shape == sin.shape == (1024, 64)
    last = 1023 * 10_000 ** (-62 / 64)  # the slowest hand at the last position
    for pair in (31, 63):
        assert cos[1023, pair] == pytest.approx(math.cos(last), abs=1e-6)
        assert sin[1023, pair] == pytest.approx(math.sin(last), abs=1e-6)


def test_chapter_a_turns_halves_and_chapter_b_adjacent_pairs_as_complex_numbers_turn() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)  # (B, T, heads, Dh)
    angles = torch.arange(5.0)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)  # (T, Dh/2)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None].to(torch.complex128)

    halves = torch.complex(x[..., :4], x[..., 4:]) * turn
    turned = course.apply_rotary_emb(x, *course.precompute_freqs_cis(8, 5, 100.0))
    torch.testing.assert_close(turned, torch.cat((halves.real, halves.imag), -1), rtol=0, atol=1e-6)

    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn
    turned = course.RotaryPositionEmbedding(8, 16, 100.0)(x.transpose(1, 2), 5).transpose(1, 2)
    torch.testing.assert_close(turned, torch.view_as_real(pairs).flatten(-2), rtol=0, atol=1e-6)


def test_turning_hidden_states_instead_of_heads_is_refused() -> None:
    with pytest.raises(ClockhandError, match="queries and keys that are turned, head by head, not hidden states"):
        course.RotaryPositionEmbedding(96, 64)(torch.randn(1, 5, 768), 5)


def test_the_causal_mask_of_five_tokens_is_the_one_drawn() -> None:
    inf = -math.inf
    assert course.create_causal_mask(5).tolist() == [
        [0, inf, inf, inf, inf],
        [0, 0, inf, inf, inf],
        [0, 0, 0, inf, inf],
        [0, 0, 0, 0, inf],
        [0, 0, 0, 0, 0],
    ]


def test_repeat_kv_puts_the_copies_of_a_head_side_by_side() -> None:
    heads = torch.tensor([[[[1.0], [2.0]]]])  # (1, 1, 2, 1)
    assert course.repeat_kv(heads, 3).flatten().tolist() == [1, 1, 1, 2, 2, 2]


def test_top_k_routing_renormalises_the_chosen() -> None:
    probabilities = torch.softmax(torch.tensor([[[2.0, 1.0, 0.0, -1.0]]]), -1)
    weights, indices = course.top_k_routing(probabilities, k=2)
    torch.testing.assert_close(weights, torch.tensor([[[0.731059, 0.268941]]]), rtol=0, atol=1e-6)
    assert indices.tolist() == [[[0, 1]]]
    assert course.top_k_routing(probabilities)[0].tolist() == [[[1.0]]]


@pytest.mark.parametrize(
    "config", [MiniLLaMAConfig(**SMALL_A), ModelArgs(**SMALL_B), ModelArgs(**SMALL_B, num_experts=2)]
)
def test_the_chapters_blocks_stacked_by_hand_are_the_model(config: MiniLLaMAConfig | ModelArgs) -> None:
    model = (MiniLLaMAForCausalLM if isinstance(config, MiniLLaMAConfig) else MiniMindModel)(config)
    theta = config.rope_theta if isinstance(config, MiniLLaMAConfig) else config.rope_base
    cos, sin = course.precompute_freqs_cis(8, 7, theta)
    x = model.transformer.token_embedding(IDS)
    for layer in model.layers:
        block = course.TransformerBlock(config)
        block.load_state_dict(layer.state_dict())
        x, _ = block(x, cos, sin)
    torch.testing.assert_close(model.lm_head(model.norm(x)), model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_attention_and_feed_forward_take_the_chapters_config() -> None:
    config, x = MiniLLaMAConfig(**SMALL_A), torch.randn(2, 7, 32)
    attended, cache = course.Attention(config)(x, *course.precompute_freqs_cis(8, 7))
    assert attended.shape == (2, 7, 32)
    assert cache is None
    study = course.SwiGLUFeedForward(config)
    expected = (F.silu(x @ study.gate_proj.weight.T) * (x @ study.up_proj.weight.T)) @ study.down_proj.weight.T
    torch.testing.assert_close(study(x), expected)


@pytest.mark.parametrize("part", [course.Attention, course.TransformerBlock])
def test_a_part_refuses_a_mask_and_a_cache(part) -> None:
    block, tables = part(MiniLLaMAConfig(**SMALL_A)), course.precompute_freqs_cis(8, 7)
    with pytest.raises(ClockhandError, match="mask must be None"):
        block(torch.randn(1, 7, 32), *tables, mask=torch.zeros(7, 7))
    with pytest.raises(ClockhandError, match="kv_cache must be None"):
        block(torch.randn(1, 7, 32), *tables, kv_cache=(None, None))
