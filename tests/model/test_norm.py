"""Normalisation against torch's own modules, and where half precision and eps show."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand.model.norm import LayerNorm, RMSNorm, make_norm, rms_norm

EPS = 1e-6


def test_rms_norm_divides_by_the_root_mean_square():
    x = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)  # claim A02: its RMS is 2
    normalised = rms_norm(x, torch.ones(4, dtype=torch.float64), 1e-12)
    torch.testing.assert_close(normalised, x / 2, rtol=1e-12, atol=0)


def test_rms_norm_keeps_the_mean_and_layer_norm_removes_it():
    x = torch.tensor([3.0, 4.0, 5.0])
    torch.testing.assert_close(RMSNorm(3, EPS)(x), x / (50 / 3) ** 0.5)
    torch.testing.assert_close(LayerNorm(3, EPS)(x), (x - 4) / (2 / 3) ** 0.5)


@pytest.mark.parametrize(("ours", "theirs"), [(RMSNorm, torch.nn.RMSNorm), (LayerNorm, torch.nn.LayerNorm)])
@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 40),
    scale=st.floats(1e-4, 1e3),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_torch(ours, theirs, width, scale, eps, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (scale * torch.randn(2, 3, width, generator=generator)).requires_grad_()
    modules = ours(width, eps), theirs(width, eps)
    with torch.no_grad():
        for parameters in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            noise = torch.randn(width, generator=generator)
            for parameter in parameters:
                parameter.copy_(noise)
    direction = torch.randn(2, 3, width, generator=generator)
    results = []
    for module in modules:
        y = module(x)
        results.append([y, *torch.autograd.grad((y * direction).sum(), [x, *module.parameters()])])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None)
@given(width=st.integers(1, 40), scale=st.floats(1e-3, 100), seed=st.integers(0, 99))
def test_the_fast_route_equals_the_definition(dtype, width, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (scale * torch.randn(3, width, generator=generator)).to(dtype).requires_grad_()
    norm = RMSNorm(width, EPS)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(width, generator=generator))
    norm.to(dtype)
    fast, plain = norm(x), rms_norm(x, norm.weight, EPS)
    assert fast.dtype == plain.dtype == dtype
    torch.testing.assert_close(fast, plain)
    gradients = [torch.autograd.grad(y.sum(), [x, norm.weight]) for y in (fast, plain)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("value", [1e-4, 300.0])
@pytest.mark.parametrize("norm_type", [RMSNorm, LayerNorm])
def test_half_precision_neither_loses_small_values_nor_overflows(norm_type, value):
    x = torch.tensor([value, -value] * 4, dtype=torch.float16)
    square = x.square().mean()
    assert square == 0 or square.isinf()  # control: what fp16 makes of the statistic (claim A04)
    normalised = norm_type(8, 1e-12).half()(x)
    torch.testing.assert_close(normalised.abs(), torch.ones_like(x), rtol=1e-3, atol=0)  # fp16 has 11 bits


@settings(max_examples=25, deadline=None)
@given(factor=st.floats(0.1, 1000), seed=st.integers(0, 99))
def test_scaling_the_input_changes_nothing_but_for_eps(factor, seed):
    x = torch.randn(16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weight = torch.ones(16, dtype=torch.float64)
    mean_square = float(x.square().mean())
    # Claim A03: norm(x) is short of the limit eps → 0 by about eps / (2·mean(x²)), and so is norm(αx) by its own.
    gap = abs(EPS / (2 * mean_square) - EPS / (2 * mean_square * factor**2))
    change = (rms_norm(factor * x, weight, EPS) / rms_norm(x, weight, EPS) - 1).abs().max()
    assert float(change) == pytest.approx(gap, rel=1e-3, abs=1e-12)


def test_eps_ends_the_scale_invariance_of_tiny_inputs():
    x = torch.tensor([1e-3, -1e-3])  # its mean square is eps
    torch.testing.assert_close(RMSNorm(2, EPS)(x).abs(), torch.full((2,), 0.5**0.5))


@pytest.mark.parametrize("norm_type", [RMSNorm, LayerNorm])
def test_a_vector_of_zeros_stays_zero_and_has_a_finite_gradient(norm_type):
    x = torch.zeros(4, requires_grad=True)
    y = norm_type(4, EPS)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(4))
    assert x.grad.isfinite().all()


def test_the_config_chooses_the_norm_and_its_eps(make_config):
    assert isinstance(make_norm(make_config(norm="rms"), 8), RMSNorm)
    assert isinstance(make_norm(make_config(norm="layer"), 8), LayerNorm)
    assert make_norm(make_config(norm_eps=0.5), 8).eps == 0.5
    assert make_norm(make_config(), 5).weight.shape == (5,)


def test_the_definition_keeps_the_type_of_x_whatever_the_weights_have():
    assert rms_norm(torch.randn(3, 4).bfloat16(), torch.ones(4), EPS).dtype == torch.bfloat16
