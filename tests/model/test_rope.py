"""Rotary positions: the angle of every pair, the two layouts, and the scalings."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clockhand.model.rope import (
    attention_factor,
    frequencies,
    half_to_interleaved,
    interleaved_to_half,
    rotate,
    rotate_complex,
    rotation,
    yarn_ramp,
)

LAYOUTS = ("half", "interleaved")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ── rotation ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=30, deadline=None)
@given(pairs=st.integers(1, 16), position=st.integers(0, 40_000), theta=st.floats(2, 1e7), seed=st.integers(0, 99))
def test_rotation_is_multiplication_by_a_complex_number_of_length_one(
    make_config, layout, pairs, position, theta, seed
):
    """Claim A09. Written out pair by pair with Python's own complex numbers, and `rotate_complex` at once."""
    config = make_config(head_dim=2 * pairs, rope_theta=theta)
    x = draw(seed, 1, 1, 1, 2 * pairs)
    cos, sin = rotation(config, torch.tensor([[position]]), dtype=torch.float64)
    turned, by_complex = rotate(x, cos, sin, layout).flatten(), rotate_complex(x, cos, sin, layout).flatten()
    for i in range(pairs):
        first, second = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        angle = position * theta ** (-2 * i / (2 * pairs))
        expected = complex(x[..., first], x[..., second]) * complex(math.cos(angle), math.sin(angle))
        # Python's and torch's powers differ in the last places of θ: a few times 40,000 · 2⁻⁵³ = 4e-12 radians.
        for result in (turned, by_complex):
            assert abs(complex(result[first], result[second]) - expected) < 4e-11
    torch.testing.assert_close(turned, by_complex, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shift", [10, 30_000])
def test_the_product_of_a_query_and_a_key_depends_on_their_distance_alone(make_config, layout, shift):
    config = make_config(head_dim=64)
    q, k = draw(0, 2, 7, 3, 64), draw(1, 2, 7, 3, 64)

    def scores(q_shift: int, k_shift: int) -> Tensor:
        positions = torch.arange(7).expand(2, 7)
        turned_q = rotate(q, *rotation(config, positions + q_shift, dtype=torch.float64), layout)
        turned_k = rotate(k, *rotation(config, positions + k_shift, dtype=torch.float64), layout)
        return torch.einsum("bthd,bshd->bhts", turned_q, turned_k)

    torch.testing.assert_close(scores(shift, shift), scores(0, 0), rtol=0, atol=1e-10)
    assert (scores(shift, 0) - scores(0, 0)).abs().max() > 1  # control: shifting one of them changes much


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_keeps_lengths_and_turns_forward_with_the_position(make_config, layout):
    config = make_config(head_dim=2)
    cos, sin = rotation(config, torch.tensor([[0, 1]]), dtype=torch.float64)
    x = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 2, 1, 2)
    turned = rotate(x, cos, sin, layout)[0, :, 0]
    torch.testing.assert_close(turned[0], x[0, 0, 0])
    torch.testing.assert_close(turned[1], torch.tensor([math.cos(1), math.sin(1)], dtype=torch.float64))


@settings(max_examples=20, deadline=None)
@given(heads=st.integers(1, 4), pairs=st.integers(1, 8), seed=st.integers(0, 99))
def test_the_two_layouts_are_one_permutation_apart(make_config, heads, pairs, seed):
    head_dim = 2 * pairs
    x = draw(seed, 1, 5, heads, head_dim)
    cos, sin = rotation(make_config(head_dim=head_dim), torch.arange(5)[None], dtype=torch.float64)

    def permute(x: Tensor) -> Tensor:  # the rows of a projection are the dimensions of its output
        return half_to_interleaved(x.flatten(-2).movedim(-1, 0), head_dim).movedim(0, -1).view_as(x)

    assert torch.equal(permute(rotate(x, cos, sin, "half")), rotate(permute(x), cos, sin, "interleaved"))
    if pairs > 1:
        assert not torch.allclose(rotate(x, cos, sin, "half"), rotate(x, cos, sin, "interleaved"))

    rows = draw(seed, heads * head_dim, 3)
    assert torch.equal(interleaved_to_half(half_to_interleaved(rows, head_dim), head_dim), rows)
    assert torch.equal(half_to_interleaved(interleaved_to_half(rows[:, 0], head_dim), head_dim), rows[:, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_turning_returns_the_type_it_was_given(make_config, layout, dtype):
    cos, sin = rotation(make_config(), torch.arange(3)[None])
    x = draw(0, 1, 3, 2, 8).to(dtype)
    assert rotate(x, cos, sin, layout).dtype == rotate_complex(x, cos, sin, layout).dtype == dtype
    torch.testing.assert_close(rotate(x, cos, sin, layout), rotate_complex(x, cos, sin, layout))


# ── angles ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_hand_turns_in_2_pi_tokens_and_the_last_of_64_dimensions_in_47117(make_config):
    theta = frequencies(make_config(head_dim=64, rope_theta=1e4))
    assert theta[0] == 1
    assert float(theta[31]) == pytest.approx(1.33352e-4, rel=1e-5)  # claim A10
    assert float(2 * math.pi / theta[31]) == pytest.approx(47_117.2, rel=1e-6)


def test_angles_at_position_30000_are_right_to_the_last_place_of_fp32(make_config):
    config = make_config(head_dim=64)
    position = torch.tensor([[30_000]])
    cos, sin = rotation(config, position)
    exact_cos, exact_sin = rotation(config, position, dtype=torch.float64)
    assert (cos - exact_cos).abs().max() < 1e-7
    assert (sin - exact_sin).abs().max() < 1e-7
    in_fp32 = (position.float() * frequencies(config).float()).cos()  # control: the product formed in fp32
    assert (in_fp32 - exact_cos[0]).abs().max() > 1e-4


def test_a_bf16_model_still_has_fp32_tables(make_config):
    cos, sin = rotation(make_config(), torch.tensor([[1000, 1001]]))
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.tensor(1000.0).bfloat16() == torch.tensor(1001.0).bfloat16()  # control: bf16 has no such positions
    assert (cos[0, 0] - cos[0, 1]).abs().max() > 0.1


# ── scalings ───────────────────────────────────────────────────────────────────────────────────────────────────────


def yarn(make_config: Any, **changes: Any) -> Any:
    settings = dict(head_dim=96, rope_theta=1e6, rope_original_max_seq_len=2048, rope_factor=16.0)
    return make_config(rope_scaling="yarn", **{**settings, **changes})


def test_yarn_has_the_numbers_of_claim_b06(make_config):
    config = yarn(make_config)
    ramp, theta = yarn_ramp(config), frequencies(config)
    assert ramp[8] == 0
    assert ramp[9] > 0
    assert ramp[20] < 1
    assert ramp[21] == 1
    assert attention_factor(config) == pytest.approx(1.27726, rel=1e-5)
    for pair, expected in {0: 1.0, 9: 0.0695815, 20: 4.25691e-4, 47: 8.33451e-8}.items():
        assert float(theta[pair]) == pytest.approx(expected, rel=2e-6)  # as many digits as the claim has


def test_a_given_attention_factor_replaces_the_computed_one_and_scales_the_tables(make_config):
    config = yarn(make_config, rope_attention_factor=0.5)
    assert attention_factor(config) == 0.5
    cos, _ = rotation(config, torch.zeros(1, 1, dtype=torch.int64))
    assert torch.equal(cos, torch.full_like(cos, 0.5))


def test_a_given_factor_is_never_recomputed_from_the_lengths(make_config):
    """max_seq_len / original is 2 here; the factor says 16, and 16 it is."""
    short, long = yarn(make_config, max_seq_len=4096), yarn(make_config, max_seq_len=2048 * 16)
    assert torch.equal(frequencies(short), frequencies(long))
    assert attention_factor(short) == attention_factor(long)


@pytest.mark.parametrize("scaling", ["none", "linear", "ntk", "dynamic", "llama3"])
def test_only_yarn_scales_the_tables(make_config, scaling):
    extra: dict[str, Any] = {} if scaling == "none" else dict(rope_factor=4.0)
    if scaling in ("dynamic", "llama3"):
        extra["rope_original_max_seq_len"] = 16
    assert attention_factor(make_config(rope_scaling=scaling, **extra)) == 1.0


def test_linear_scaling_is_a_division_of_the_positions(make_config):
    stretched = make_config(rope_scaling="linear", rope_factor=4.0)
    positions = torch.arange(0, 40, 4)[None]
    torch.testing.assert_close(rotation(stretched, positions), rotation(make_config(), positions // 4))


def test_ntk_keeps_the_fastest_hand_and_slows_the_slowest_by_the_factor(make_config):
    plain, stretched = frequencies(make_config()), frequencies(make_config(rope_scaling="ntk", rope_factor=5.0))
    assert stretched[0] == plain[0]
    assert float(plain[-1] / stretched[-1]) == pytest.approx(5, rel=1e-12)


def test_dynamic_scaling_does_nothing_up_to_the_trained_length_and_reads_each_row_alone(make_config):
    config = make_config(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=16)
    theta = frequencies(config, torch.tensor([[1], [16], [17], [48]]))[:, 0]  # (4, Dh/2)
    plain = frequencies(make_config())
    assert torch.equal(theta[0], plain)
    assert torch.equal(theta[1], plain)
    assert (theta[2, 1:] < plain[1:]).all()
    # The slowest hand is slower by 2·48/16 - 1 = 5.
    assert float(plain[-1] / theta[3, -1]) == pytest.approx(5, rel=1e-12)


# 131,072 tokens are more than a turn of the slowest hand of base 10,000: yarn's ramp then ends beyond the last pair.
@pytest.mark.parametrize("original", [512, 131_072])
@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("factor", [1.5, 32.0])
def test_frequencies_are_those_of_transformers(make_config, scaling, head_dim, theta, factor, original):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    ours = make_config(
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rope_factor=factor,
        rope_original_max_seq_len=0 if scaling == "linear" else original,
    )
    theirs = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=original,
        rope_parameters={
            "rope_type": scaling,
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    )
    for length in (100, original, original + 1, 10 * original) if scaling == "dynamic" else (None,):
        lengths = None if length is None else torch.tensor([[length]])
        their_theta, their_factor = rope_utils.ROPE_INIT_FUNCTIONS[scaling](theirs, "cpu", seq_len=length)
        # 2e-6: theirs is computed in fp32, where a power of a base of 1e6 is off by a few 1e-7.
        torch.testing.assert_close(frequencies(ours, lengths).flatten().float(), their_theta, rtol=2e-6, atol=0)
        assert attention_factor(ours) == pytest.approx(their_factor, rel=1e-12)


def test_yarn_and_a_larger_base_are_different_rules(make_config):
    """The chapter takes YaRN for base · factor (claim B06): a hand in the middle is then wrong by half its speed."""
    larger_base = frequencies(make_config(head_dim=96, rope_theta=16e6))
    assert (larger_base / frequencies(yarn(make_config)) - 1).abs().max() > 0.5
