"""Muon: an update with no favourite direction (Jordan et al. 2024).

    M ← μ·M + (1 - μ)·∇            momentum
    U = (1 - μ)·∇ + μ·M            Nesterov's look ahead
    W ← (1 - η·λ)·W - η·0.2·√max(rows, columns)·orthogonal(U)

`orthogonal` keeps the singular vectors of a matrix and brings its singular values near 1, so that what the gradient
says loudly and what it says softly are learned at the same pace. No decomposition is made: each round of
X ← aX + (bA + cA²)X with A = XXᵀ bends all singular values by the same polynomial, and five rounds bring those that are
at least a 500th of the matrix's norm to between 0.65 and 1.25. The factor before it makes the entries of an update
about as large as AdamW's (Liu et al. 2025), so one learning rate suits both.

It does what `torch.optim.Muon` does, to which it is tested equal, for all matrices of one shape at once: a small model
has dozens of them, and going through them one by one takes as long as its whole backward pass (LOG.md).
"""

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

MOMENTUM, ROUNDS, EPS = 0.95, 5, 1e-7
POLYNOMIAL = (3.4445, -4.775, 2.0315)
"""Steepest at 0 of those that end near 1: tiny singular values grow 3.4 times a round."""
STACKED = 2**24
"""Values stacked at a time: a few large matrices gain nothing from company, and their copies cost memory."""


class Muon(torch.optim.Optimizer):
    """For matrices alone. `dtype` is that of the products in `orthogonal`; the weights and the momentum keep theirs."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, weight_decay: float, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = sorted((p for p in group["params"] if p.grad is not None), key=_sides)
            for _, alike in groupby(parameters, _sides):
                for stack in _stacks(list(alike)):
                    self._update(stack, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """All of one shape, some perhaps lying on their side."""
        updates = []
        for parameter in parameters:
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp(momentum, MOMENTUM)
            updates.append(update.T if _is_tall(update) else update)
        directions = orthogonal(torch.stack(updates).to(self.dtype))  # (n, short side, long side)
        rate = group["lr"] * 0.2 * math.sqrt(max(parameters[0].shape))
        for parameter, direction in zip(parameters, directions):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction.T if _is_tall(parameter) else direction, alpha=-rate)


def orthogonal(x: Tensor) -> Tensor:
    """For x (n, rows, columns), rows <= columns: its matrices with the singular values brought near 1, same type."""
    a, b, c = POLYNOMIAL
    x = x / torch.linalg.matrix_norm(x.float(), keepdim=True).clamp(min=EPS).to(x.dtype)
    for _ in range(ROUNDS):
        gram = x @ x.mT  # (n, rows, rows)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _stacks(parameters: list[Tensor]) -> list[list[Tensor]]:
    size = max(STACKED // parameters[0].numel(), 1)
    return [parameters[begin : begin + size] for begin in range(0, len(parameters), size)]


def _sides(parameter: Tensor) -> tuple[int, int]:
    return min(parameter.shape), max(parameter.shape)


def _is_tall(x: Tensor) -> bool:
    return x.shape[0] > x.shape[1]
