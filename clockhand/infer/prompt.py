"""Many tokens of one text at once: what a prompt needs that a single token does not.

Products are calls of the matrix product, finished within them where oneDNN can; whole blocks of the cache are written
and read as such; attention is two products for a block of queries at a time, so that its memory does not grow with the
square of the prompt.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.infer.block import Products
from clockhand.infer.step import LANES, PLACES, remember
from clockhand.model.packed import Matrix, unpack

QUERIES = 128
"""Queries of a prompt that attend at once."""


class WithMany(Products):
    """x (T, D), W (N, D) -> (T, N), in the type of x: one call of a matrix product."""

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        return F.linear(x, unpack(matrix).to(x.dtype))


class WithManyFused(WithMany):
    """The same by oneDNN, which does to a product what is to be done while it still has it in its registers."""

    def plain(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        return self._fused(x, matrix, bias, "none")

    def added(self, x: Tensor, matrix: Matrix, bias: Tensor | None, before: Tensor | None) -> Tensor:
        return self._fused(x, matrix, bias, "none") if before is None else self._with(x, matrix, bias, "add", before)

    def gated(self, x: Tensor, gate: Matrix, gate_bias: Tensor | None, up: Matrix, up_bias: Tensor | None) -> Tensor:
        return self._with(x, up, up_bias, "mul", self._fused(x, gate, gate_bias, "swish"))

    def _fused(self, x: Tensor, matrix: Matrix, bias: Tensor | None, then: str) -> Tensor:
        weight, bias = unpack(matrix).to(x.dtype), None if bias is None else bias.to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")

    def _with(self, x: Tensor, matrix: Matrix, bias: Tensor | None, then: str, other: Tensor) -> Tensor:
        weight, bias = unpack(matrix).to(x.dtype), None if bias is None else bias.to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, then)


def remember_many(memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, places: Tensor, begin: int) -> None:
    """`remember`, with whole blocks copied as such."""
    keys, values = memory
    whole = 0 if begin % PLACES else len(k) // PLACES * PLACES
    blocks = slice(begin // PLACES, (begin + whole) // PLACES)
    if whole:
        k_blocks = k[:whole].view(-1, PLACES // LANES, LANES, *k.shape[1:])  # (blocks, 64/16, 16, K, Dh)
        v_blocks = v[:whole].view(-1, PLACES, v.shape[1], *values.shape[2::2])  # (blocks, 64, K, Dh/16, 16)
        keys[blocks] = k_blocks.permute(0, 3, 1, 4, 2).to(keys.dtype)
        values[blocks] = v_blocks.permute(0, 2, 3, 1, 4).to(values.dtype)
    if whole < len(k):
        remember(memory, k[whole:], v[whole:], places[whole:])


def recall(memory: tuple[Tensor, Tensor], length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a cache, each (S, K, Dh)."""
    blocks = -(-length // PLACES)
    keys = memory[0][:blocks].permute(0, 2, 4, 1, 3)  # (blocks, 64/16, 16, K, Dh)
    values = memory[1][:blocks].permute(0, 3, 1, 2, 4)  # (blocks, 64, K, Dh/16, 16)
    return keys.flatten(0, 2)[:length].to(dtype), values.flatten(3).flatten(0, 1)[:length].to(dtype)


def recall_places(memory: tuple[Tensor, Tensor], places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys and values at `places` (S,), in their order, each (S, K, Dh)."""
    keys, values = memory
    block, place = places // PLACES, places % PLACES
    picked = keys[block, :, place // LANES, :, place % LANES]  # (S, K, Dh)
    return picked.to(dtype), values[block, :, :, place].flatten(2).to(dtype)


def attend_many(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q (T, H, Dh), the last T of the S positions that k and v (S, K, Dh) have -> (T, H, Dh).

    Plain products over a block of queries at a time, each with the keys up to its end, and the heads of a group as rows
    of one matrix. torch's fused kernel took a third of the time of the whole prompt on a CPU (LOG.md).
    """
    length, first, kv_heads = len(q), len(k) - len(q), k.shape[1]
    q = (q / math.sqrt(q.shape[-1])).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # (K, G, T, Dh)
    k, v = k.permute(1, 2, 0).contiguous(), v.transpose(0, 1).contiguous()  # (K, Dh, S), (K, S, Dh)
    later = torch.full((QUERIES, QUERIES), -math.inf, dtype=q.dtype).triu(1)
    attended = []
    for begin in range(0, length, QUERIES):
        some = q[:, :, begin : begin + QUERIES]  # (K, G, t, Dh)
        tokens = some.shape[2]
        start, end = first + begin, first + begin + tokens
        start = max(0, start - window + 1) if window else 0
        scores = torch.bmm(some.flatten(1, 2), k[:, :, start:end])  # (K, G·t, S)
        each = scores.view(*some.shape[:3], -1)  # (K, G, t, S)
        if window:
            here = torch.arange(end - tokens, end)
            behind = here[:, None] - torch.arange(start, end)
            each.masked_fill_((behind < 0) | (behind >= window), -math.inf)
        else:  # all that came before this block is seen by all of it
            each[..., -tokens:] += later[:tokens, :tokens]
        mixed = torch.bmm(torch.softmax(scores, dim=-1), v[:, start:end])  # in fp32 within
        attended.append(mixed.view_as(some).permute(2, 0, 1, 3))  # (t, K, G, Dh)
    return torch.cat(attended).flatten(1, 2)
