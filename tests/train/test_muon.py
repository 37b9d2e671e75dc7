"""Muon for all matrices at once equals torch's, which takes them one by one."""

import pytest
import torch

from clockhand.train import muon
from clockhand.train.muon import Muon, orthogonal

SHAPES = [(8, 8), (12, 8), (8, 12), (12, 8), (8, 8), (3, 40)]


@pytest.mark.parametrize("stacked", [1, 200, 2**24])
def test_an_update_is_that_of_torch(monkeypatch, stacked):
    monkeypatch.setattr(muon, "STACKED", stacked)
    torch.manual_seed(0)
    start, gradients = ([torch.randn(shape) for shape in SHAPES] for _ in range(2))
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    optimizers = (
        Muon(ours, lr=0.02, weight_decay=0.1),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(3):
        for parameters, optimizer in zip((ours, theirs), optimizers):
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient * (step + 1)
            optimizer.step()
    for mine, other, first in zip(ours, theirs, start):
        # bf16 rounds to 1/256 of a direction's entries, in five rounds of sums that are made in another order.
        torch.testing.assert_close(mine - first, other - first, rtol=0.05, atol=2e-3)
        assert (mine - first).abs().max() > 0.02  # far more than the tolerance


def bent(values: torch.Tensor) -> torch.Tensor:
    a, b, c = muon.POLYNOMIAL
    for _ in range(muon.ROUNDS):
        values = a * values + b * values**3 + c * values**5
    return values


def test_each_singular_value_is_bent_by_the_polynomial_and_the_singular_vectors_stay():
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, 16, dtype=torch.float64)).Q for n in (16, 32))
    values = torch.logspace(-3, 0, 16, dtype=torch.float64)
    values /= values.norm()
    found = orthogonal((u @ torch.diag(7 * values) @ v.T)[None])[0]
    torch.testing.assert_close(found, u @ torch.diag(bent(values)) @ v.T, rtol=1e-5, atol=1e-6)  # the norm is fp32


def test_what_is_a_five_hundredth_of_the_norm_or_more_comes_near_one():
    values = bent(torch.linspace(0.002, 1, 10_000))
    assert 0.65 < values.min() < values.max() < 1.25


def test_a_parameter_without_gradient_stays_and_one_of_zeros_only_decays():
    idle, still = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4, 4))
    still.grad = torch.zeros(4, 4)
    Muon([idle, still], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(idle, torch.ones(4, 4))
    torch.testing.assert_close(still.detach(), torch.full((4, 4), 0.95))
