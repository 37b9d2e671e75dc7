"""Attention with weights, against the same thing written out from its equation."""

import math

import pytest
import torch
from torch import Tensor

from clockhand.model.attend import Visibility
from clockhand.model.attention import Attention
from clockhand.model.norm import rms_norm
from clockhand.model.rope import half_to_interleaved, rotate_complex, rotation


def by_hand(attention: Attention, x: Tensor, positions: Tensor, *, rotate_first: bool = False) -> Tensor:
    """One row, head by head: project, normalise, rotate, softmax over the past, mix, project back."""
    config, weights = attention.config, attention.state_dict()
    tables = rotation(config, positions, dtype=x.dtype)

    def project(name: str) -> Tensor:
        y = x @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", 0)
        return y.unflatten(-1, (-1, config.head_dim))

    def normalise(y: Tensor, name: str) -> Tensor:
        return rms_norm(y, weights[f"{name}_norm.weight"], config.norm_eps) if config.qk_norm else y

    def turn(y: Tensor) -> Tensor:
        return rotate_complex(y, *tables, config.rope_layout)

    q, k, v = project("q"), project("k"), project("v")
    if rotate_first:
        q, k = normalise(turn(q), "q"), normalise(turn(k), "k")
    else:
        q, k = turn(normalise(q, "q")), turn(normalise(k, "k"))
    heads = []
    for h in range(config.n_heads):
        kv = h // (config.n_heads // config.n_kv_heads)
        scores = q[0, :, h] @ k[0, :, kv].T / math.sqrt(config.head_dim)
        scores = scores.masked_fill(positions[0] > positions[0][:, None], -math.inf)
        heads.append(scores.softmax(-1) @ v[0, :, kv])
    return torch.cat(heads, dim=-1)[None] @ weights["o_proj.weight"].T + weights.get("o_proj.bias", 0)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3), (1, 1)])
@pytest.mark.parametrize("head_dim", [2, 8, 10])
@pytest.mark.parametrize("bias", ["none", "qkv", "all"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_it_is_its_equation(make_model, heads, head_dim, bias, qk_norm):
    n_heads, n_kv_heads = heads
    model = make_model(
        n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, attention_bias=bias, qk_norm=qk_norm
    ).double()
    attention = model.blocks[0].attention
    x = torch.randn(1, 6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6)[None]
    out = attention(x, rotation(model.config, positions, dtype=torch.float64), Visibility(positions, positions))
    torch.testing.assert_close(out, by_hand(attention, x, positions))
    if qk_norm:  # control: normalising after the rotation is something else, because the weights differ within a pair
        assert not torch.allclose(out, by_hand(attention, x, positions, rotate_first=True), atol=1e-3)


@pytest.mark.parametrize("bias", ["none", "qkv", "all"])
def test_biases_are_where_the_config_says(make_model, bias):
    attention = make_model(attention_bias=bias).blocks[0].attention
    has = {name: getattr(attention, f"{name}_proj").bias is not None for name in "qkvo"}
    assert has == dict(q=bias != "none", k=bias != "none", v=bias != "none", o=bias == "all")


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", ["none", "qkv"])
def test_the_layouts_give_equal_logits_with_the_rows_of_q_and_k_permuted(make_model, make_ids, qk_norm, bias):
    settings = dict(qk_norm=qk_norm, attention_bias=bias)
    half, interleaved = make_model(**settings), make_model(**settings, rope_layout="interleaved")
    ids = make_ids(2, 12)
    expected = half(ids).logits
    assert not torch.allclose(interleaved(ids).logits, expected, atol=0.1)  # control: the same weights as they are

    weights = half.state_dict()
    for name in weights:
        if any(f".{part}_proj." in name or f".{part}_norm." in name for part in "qk"):
            weights[name] = half_to_interleaved(weights[name], 8)
    interleaved.load_state_dict(weights)
    torch.testing.assert_close(interleaved(ids).logits, expected, rtol=1e-4, atol=1e-4)

    if qk_norm:  # control: the norm weights belong to dimensions too
        for name in weights:
            if "_norm." in name:
                weights[name] = half.state_dict()[name]
        interleaved.load_state_dict(weights)
        assert not torch.allclose(interleaved(ids).logits, expected, atol=0.01)


def test_head_dim_is_free_of_d_model(make_model):
    attention = make_model(d_model=10, head_dim=6, n_heads=4, n_kv_heads=2).blocks[0].attention
    shapes = {name: tuple(weight.shape) for name, weight in attention.state_dict().items()}
    assert shapes == {
        "q_proj.weight": (24, 10),
        "k_proj.weight": (12, 10),
        "v_proj.weight": (12, 10),
        "o_proj.weight": (10, 24),
    }
