"""Weights for inference: the model's matrices in the type they are read in, and how much that costs in quality.

    fp32    as trained
    bf16    half the bytes, 8 bits of mantissa
    int8    w ≈ q · scale, one scale a row          q = round(w / scale), scale = max|row| / 127
    int4    w ≈ (q - 8) · scale, one scale for each group of 32 columns; two numbers in a byte

Only matrices are rounded: norms, biases, an expert's router and all arithmetic stay as they were. A row of the
embedding is looked up in the same numbers that the head multiplies by. For one stream the machine reads every weight
once a token, so the bytes decide the speed; the price is told by `compare`, in nats between the predictions.

How the numbers are multiplied is in `decode.py`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.errors import ClockhandError, unknown_name
from clockhand.model.transformer import Transformer

PRECISIONS = ("fp32", "bf16", "int8", "int4")
GROUP = 32
"""Columns that share a scale in int4."""


@dataclass(frozen=True)
class Matrix:
    """A matrix (..., N, D) as it is stored. The scale is an empty tensor where there is none."""

    data: Tensor  # (..., N, D) fp32, bf16 or int8; for int4 (..., N, D/2) uint8
    scale: Tensor  # int8: (..., N) fp32; int4: (..., N, D/32) fp32

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


def check_precision(precision: str, name: str = "precision") -> None:
    if precision not in PRECISIONS:
        raise unknown_name(name, precision, PRECISIONS)


def pack(weight: Tensor, precision: str) -> Matrix:
    """`weight` (..., N, D) rounded to `precision`. Raises `ClockhandError` where int4's groups do not fit."""
    check_precision(precision)
    weight = weight.detach().float()
    none = torch.empty(0)
    if precision == "fp32":
        return Matrix(weight.contiguous(), none)
    if precision == "bf16":
        return Matrix(weight.to(torch.bfloat16).contiguous(), none)
    if precision == "int8":
        scale = _scale(weight.abs().amax(-1), 127)  # (..., N)
        return Matrix((weight / scale[..., None]).round().to(torch.int8), scale)
    if weight.shape[-1] % GROUP:
        raise ClockhandError(f"int4 needs rows of a multiple of {GROUP} weights, not {weight.shape[-1]}")
    groups = weight.unflatten(-1, (-1, GROUP))  # (..., N, D/32, 32)
    scale = _scale(groups.abs().amax(-1), 7)  # (..., N, D/32)
    numbers = ((groups / scale[..., None]).round() + 8).to(torch.uint8)  # 1 to 15
    low, high = numbers.chunk(2, dim=-1)  # byte j of a group holds columns j and j + 16
    return Matrix((low | (high << 4)).flatten(-2).contiguous(), scale)


def unpack(matrix: Matrix) -> Tensor:
    """The weights that `matrix` stands for, (..., N, D): bf16 as such, everything else fp32."""
    data, scale = matrix.data, matrix.scale
    if data.dtype == torch.uint8:
        groups = data.unflatten(-1, (-1, GROUP // 2))  # (..., N, D/32, 16)
        numbers = torch.cat((groups & 15, groups >> 4), dim=-1).float() - 8
        return (numbers * scale[..., None]).flatten(-2)
    return data.float() * scale[..., None] if data.dtype == torch.int8 else data


def _scale(largest: Tensor, levels: int) -> Tensor:
    return (largest / levels).clamp(min=1e-12)  # a row of zeros is 0 times anything


def rounded(model: Transformer, precision: str) -> Transformer:
    """A copy of `model` in fp32 whose matrices hold what `precision` leaves of them: for the plain, slow route."""
    from copy import deepcopy

    twin = deepcopy(model).float()
    for name, module in twin.named_modules():
        kept = name.endswith(("position_embedding", "router"))
        if isinstance(module, nn.Linear | nn.Embedding) and not kept:
            module.weight = nn.Parameter(unpack(pack(module.weight, precision)).float(), requires_grad=False)
    if twin.config.tie_embeddings:
        twin.lm_head.weight = twin.token_embedding.weight
    return twin.eval()


@dataclass(frozen=True)
class Quality:
    """What rounding costs, over all predictions of a text."""

    tokens: int
    kl: float
    """Mean Kullback-Leibler distance of the rounded model's prediction from the original's, in nats a token."""
    perplexity: float
    perplexity_fp32: float


@torch.no_grad()
def compare(model: Transformer, precision: str, rows: Iterable[Sequence[int]]) -> Quality:
    """The predictions of `model` at every position of `rows` of ids, in fp32 and rounded to `precision`."""
    exact, twin = rounded(model, "fp32"), rounded(model, precision)
    tokens, kl, nats, nats_exact = 0, 0.0, 0.0, 0.0
    for row in rows:
        ids = torch.tensor([row])
        if ids.shape[1] < 2:
            continue
        p, q = (F.log_softmax(each(ids[:, :-1]).logits[0].double(), dim=-1) for each in (exact, twin))  # (T, V)
        tokens += len(p)
        kl += float((p.exp() * (p - q)).sum())
        targets = ids[0, 1:, None]
        nats -= float(q.gather(-1, targets).sum())
        nats_exact -= float(p.gather(-1, targets).sum())
    if not tokens:
        raise ClockhandError("nothing to compare on: every row of ids is shorter than 2")
    return Quality(tokens, kl / tokens, math.exp(nats / tokens), math.exp(nats_exact / tokens))
