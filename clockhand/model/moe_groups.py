"""Experts for training on a CPU: what `MixtureOfExperts.forward` says, with shapes that are known beforehand.

Every (token, choice) pair is given a row of one table, and the rows of an expert lie together:

    rows     0 ▓▓▓▓▓▓▓▓▓▓░░   expert 0        ▓ a pair's copy of its token
            32 ▓▓▓▓░░░░░░░░   expert 1        ░ padding, zeros, up to a multiple of 32
            64 ▓▓▓▓▓▓▓▓▓▓▓▓   expert 2
               ░░░░░░░░░░░░   nobody's        so that the table has one size, however the tokens fall

The table's size is known before anything is, so a block with experts is compiled as one graph like any other; only the
products, one after another over the groups of rows, are hidden from the compiler. Padded, they have few sizes: oneDNN
prepares itself for each new one, which took up to a fifth of a product (LOG.md). Token to row and back is a gather in
both directions, since each side knows the other: no sum ever collides.

The plain dispatch stays the reference, and what runs uncompiled.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.model.mlp import SwiGLU

ROWS = 32
"""An expert's rows are padded to a multiple of this."""


class Grouping(NamedTuple):
    """Which pair of the N·k (token, choice) pairs has which of the R rows."""

    row_of_pair: Tensor  # (N, k) int64
    pair_of_row: Tensor  # (R,) int64, N·k where a row is nobody's
    ends: Tensor  # (E,) int64: behind the last row of each expert, padding included


def group(experts: Tensor, n_experts: int) -> Grouping:
    """Rows for `experts` (N, k), the choices of N tokens. An expert's rows keep the order of the tokens."""
    pairs = experts.flatten()
    chosen = (pairs[:, None] == torch.arange(n_experts, device=pairs.device)).long()  # (N·k, E)
    before = ((chosen.cumsum(0) - 1) * chosen).sum(1)  # how many pairs before this one chose the same expert
    sizes = (chosen.sum(0) + ROWS - 1) // ROWS * ROWS
    ends = sizes.cumsum(0)
    row_of_pair = (ends - sizes)[pairs] + before
    most = (len(pairs) + n_experts * (ROWS - 1)) // ROWS * ROWS
    nobody = torch.full((most,), len(pairs), device=pairs.device)
    pair_of_row = nobody.scatter(0, row_of_pair, torch.arange(len(pairs), device=pairs.device))
    return Grouping(row_of_pair.view_as(experts), pair_of_row, ends)


def can_group(experts: nn.ModuleList) -> bool:
    """Whether `run_experts` knows these: those with a bias it does not."""
    return all(parameter.dim() == 2 for parameter in experts.parameters())


def run_experts(tokens: Tensor, experts: nn.ModuleList, chosen: Tensor, weights: Tensor) -> Tensor:
    """Σ_j weights[n, j] · experts[chosen[n, j]](tokens[n]), (N, D) in the type of `tokens` (N, D).

    `chosen` (N, k) int64 and `weights` (N, k) say who answers and how much it counts. Products are made in autocast's
    type where it is on.
    """
    device = tokens.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tokens.dtype
    grouping = group(chosen, len(experts))

    def project(name: str, rows: Tensor) -> Tensor:
        matrices = [getattr(expert, name).weight for expert in experts]
        return _Project.apply(rows, grouping.ends, *matrices)

    rows = _Spread.apply(tokens.to(dtype), grouping.row_of_pair, grouping.pair_of_row)  # (R, D)
    first = experts[0]
    if isinstance(first, SwiGLU):
        risen = F.silu(project("gate_proj", rows)) * project("up_proj", rows)  # (R, F)
    else:
        risen = first.activation(project("up_proj", rows))  # type: ignore[operator]
    return _Collect.apply(
        project("down_proj", risen), weights.to(tokens.dtype), grouping.row_of_pair, grouping.pair_of_row
    )


class _Spread(torch.autograd.Function):
    """Tokens to rows: rows[r] = tokens[the token of r], or 0."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, row_of_pair: Tensor, pair_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_pair)
        return _of_rows(tokens, row_of_pair, pair_of_row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_pair,) = ctx.saved_tensors
        return gradients[0][row_of_pair].sum(1), None, None


class _Collect(torch.autograd.Function):
    """Rows to tokens: mixed[n] = Σ_j weights[n, j] · rows[row_of_pair[n, j]]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, row_of_pair: Tensor, pair_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, row_of_pair, pair_of_row)
        return (rows[row_of_pair] * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, row_of_pair, pair_of_row = ctx.saved_tensors
        d_mixed = gradients[0]  # (N, D)
        share = _of_rows(weights.view(-1, 1), row_of_pair.view(-1, 1), pair_of_row)  # (R, 1)
        d_rows = (_of_rows(d_mixed, row_of_pair, pair_of_row) * share).to(rows.dtype)
        return d_rows, (rows[row_of_pair] * d_mixed[:, None]).sum(-1), None, None


def _of_rows(values: Tensor, row_of_pair: Tensor, pair_of_row: Tensor) -> Tensor:
    """values[n] for every row of one of n's pairs, and 0 for nobody's: (N, ...) -> (R, ...)."""
    taken = (pair_of_row < row_of_pair.numel())[:, None]
    owner = (pair_of_row // row_of_pair.shape[1]).clamp(max=len(values) - 1)
    return torch.where(taken, values[owner], 0)


class _Project(torch.autograd.Function):
    """rows·W_eᵀ for the rows of each expert e."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *matrices)
        return _products(rows, [matrix.T for matrix in matrices], ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *matrices = ctx.saved_tensors
        slope = gradients[0]
        return _products(slope, matrices, ends), None, *_products_over_rows(slope, rows, ends, matrices[0].dtype)


# A matrix is rounded to the type of the rows just before its product, and a gradient widened just behind: what lies
# between fits the last cache, while the rounded copies of all experts would travel through memory once more.


@torch.library.custom_op("clockhand::products", mutates_args=())
def _products(rows: Tensor, matrices: Sequence[Tensor], ends: Tensor) -> Tensor:
    """(R, in) and E matrices (in, out) of any type -> (R, out) in the type of the rows; 0 in nobody's rows."""
    answer = rows.new_empty(len(rows), matrices[0].shape[1])
    begin = 0
    for matrix, end in zip(matrices, ends.tolist()):
        torch.mm(rows[begin:end], matrix.to(rows.dtype), out=answer[begin:end])
        begin = end
    answer[begin:].zero_()
    return answer


@_products.register_fake
def _(rows: Tensor, matrices: Sequence[Tensor], ends: Tensor) -> Tensor:
    return rows.new_empty(len(rows), matrices[0].shape[1])


@torch.library.custom_op("clockhand::products_over_rows", mutates_args=())
def _products_over_rows(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """leftᵀ·right over the rows of each expert: (R, out) and (R, in) -> E times (out, in); 0 for one without rows."""
    answers = []
    begin = 0
    for end in ends.tolist():
        # A product already of this type is a tensor of its own, as it must be.
        answers.append(torch.mm(left[begin:end].T, right[begin:end]).to(dtype))
        begin = end
    return answers


@_products_over_rows.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [left.new_empty(left.shape[1], right.shape[1], dtype=dtype) for _ in range(len(ends))]
