"""The feed-forward part against its formulas, and what the chapters say of SiLU."""

import math

import pytest
import torch

from clockhand.model.mlp import MLP, SwiGLU, make_mlp


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


FUNCTIONS = {
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "relu": lambda x: max(x, 0.0),
}


def values(x: torch.Tensor, function) -> torch.Tensor:
    return torch.tensor([function(value) for value in x.flatten().tolist()], dtype=x.dtype).view_as(x)


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_plain_mlps_are_a_projection_a_bend_and_a_projection(make_config, kind, bias):
    mlp = make_mlp(make_config(mlp=kind, mlp_bias=bias)).double()
    assert isinstance(mlp, MLP)
    x = 3 * torch.randn(5, 24, dtype=torch.float64)
    up = x @ mlp.up_proj.weight.T + (mlp.up_proj.bias if bias else 0)
    expected = values(up.detach(), FUNCTIONS[kind]) @ mlp.down_proj.weight.T + (mlp.down_proj.bias if bias else 0)
    torch.testing.assert_close(mlp(x), expected)


def test_gelu_is_the_exact_one_not_the_tanh_approximation(make_config):
    mlp = make_mlp(make_config(mlp="gelu", d_model=1, d_ff=1)).double()
    with torch.no_grad():
        mlp.up_proj.weight.fill_(1)
        mlp.down_proj.weight.fill_(1)
    x = torch.tensor([[2.7]], dtype=torch.float64)
    exact = FUNCTIONS["gelu"](2.7)
    assert mlp(x).item() == pytest.approx(exact, abs=1e-14)
    assert torch.nn.functional.gelu(x, approximate="tanh").item() != pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_multiplies_the_up_projection_by_the_bent_gate(make_config, bias):
    mlp = make_mlp(make_config(mlp_bias=bias)).double()
    assert isinstance(mlp, SwiGLU)
    x = 3 * torch.randn(5, 24, dtype=torch.float64)
    gate = x @ mlp.gate_proj.weight.T + (mlp.gate_proj.bias if bias else 0)
    up = x @ mlp.up_proj.weight.T + (mlp.up_proj.bias if bias else 0)
    bent = values(gate.detach(), lambda value: value * sigmoid(value))
    expected = (bent * up) @ mlp.down_proj.weight.T + (mlp.down_proj.bias if bias else 0)
    torch.testing.assert_close(mlp(x), expected)
    swapped = (values(up.detach(), lambda value: value * sigmoid(value)) * gate) @ mlp.down_proj.weight.T
    assert not torch.allclose(mlp(x), swapped, atol=1e-3)  # control: which of the two is bent matters


def test_gating_costs_half_as_much_again_at_equal_width(make_config):
    counts = {
        kind: sum(p.numel() for p in make_mlp(make_config(mlp=kind, d_model=768, d_ff=3072)).parameters())
        for kind in ("relu", "swiglu")
    }
    assert counts == {"relu": 4_718_592, "swiglu": 7_077_888}  # claim B12


def test_a_width_of_one_works(make_config):
    for kind in ("swiglu", "gelu", "relu"):
        assert make_mlp(make_config(mlp=kind, d_ff=1))(torch.ones(2, 3, 24)).shape == (2, 3, 24)


def test_silu_has_the_slope_the_chapter_says_and_is_no_valve_between_0_and_1():
    """Claims A12 and A13, of the very function the gate calls."""
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.silu(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    x, y = x.detach(), y.detach()
    gate = torch.sigmoid(x)
    torch.testing.assert_close(slope, gate * (1 + x * (1 - gate)))
    differences = (y[2:] - y[:-2]) / (x[2:] - x[:-2])
    torch.testing.assert_close(differences, slope[1:-1], rtol=0, atol=1e-8)  # h²/6 of a step of 1e-4

    assert float(y.min()) == pytest.approx(-0.27846, abs=1e-5)
    assert float(x[y.argmin()]) == pytest.approx(-1.27846, abs=1e-4)
    assert float(slope.max()) == pytest.approx(1.09984, abs=1e-5)
    assert float(x[slope.argmax()]) == pytest.approx(2.39936, abs=1e-4)
    assert float(slope[300_000]) == pytest.approx(0.5)
    assert y.max() > 29
