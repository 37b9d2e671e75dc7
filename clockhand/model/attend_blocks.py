"""Attention for training on a CPU: the same mathematics as `attend_reference`, as large matrix products.

The queries are cut into blocks of 128. The block that begins at position b has nothing to look for beyond its own end,
nor before the window of its first query if there is one, so those products are never made:

            keys 0 ────────────────► S
    block 0 ▓▓
    block 1 ▓▓▓▓                     rows: the G query heads of one KV head, one under the other, so that
    block 2 ▓▓▓▓▓▓                         a single product serves them all
    block 3 ▓▓▓▓▓▓▓▓                           with a window:   ··▓▓▓▓▓▓

Forward keeps only the output and the logarithm of each softmax's sum (as FlashAttention does, Dao et al. 2022), and
backward makes the weights again. What stands between the products is left to torch's compiler to fuse; uncompiled this
is slower than the fused kernel of `attend`.
"""

import math
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
ALIGNED = 16
"""A window's first key is sought at a multiple of this: rows of scores of odd lengths fill no vector register."""


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, window: int = 0) -> Tensor:
    """softmax(q·kᵀ/√Dh + bias)·v, q (B, T, H, Dh), k and v (B, T, K, Dh) -> (B, T, H, Dh).

    The bias is 0 where a query sees a key and -inf where not: (B, T, T), or where all rows simply count up what `strip`
    makes. No query may see a key behind itself in the row or, with a `window`, one that many places before itself; and
    each must see one. Products are made in the type of q; softmax and its sums are fp32.
    """
    return _AttendBlocks.apply(q, k, v, bias, window)


def strip(length: int, window: int = 0, device: torch.device | None = None) -> Tensor:
    """The bias of every block of a row that counts 0, 1, 2, ... up to `length`, (BLOCK, `length` or a little more).

    Who sees whom is a matter of distance there, so all blocks have the same bias; of an early block it is cut off at
    the left. For 8 rows of 8,192 tokens this is 2 MB where a bias for every pair is 1 GB.
    """
    width = -(-length // BLOCK) * BLOCK
    distance = torch.arange(BLOCK, device=device)[:, None] - torch.arange(BLOCK - width, BLOCK, device=device)
    seen = distance >= 0
    if window:
        seen &= distance < window
    return as_bias(seen)


def as_bias(seen: Tensor) -> Tensor:
    """0 where `seen`, -inf where not. Both are exact in bf16, the smallest to read."""
    return torch.zeros(seen.shape, dtype=torch.bfloat16, device=seen.device).masked_fill_(~seen, -math.inf)


def keys_of_block(begin: int, length: int, window: int) -> tuple[int, int]:
    """The first key that the block of queries from `begin` looks at, and the one behind its last."""
    first = max(begin - window + 1, 0) if window else 0
    return first // ALIGNED * ALIGNED, min(begin + BLOCK, length)


class _AttendBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, window: int) -> Tensor:
        n_kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
        q, k, v = _stack(q, n_kv_heads), _stack(k, n_kv_heads), _stack(v, n_kv_heads)  # (B·K, T·G or T, Dh)
        answers, log_sums = [], []
        for begin in range(0, k.shape[1], BLOCK):
            rows, keys = slice(begin * group, (begin + BLOCK) * group), slice(*keys_of_block(begin, k.shape[1], window))
            scores = _scores(q[:, rows], k[:, keys], _bias_of(bias, begin, keys), n_kv_heads, group)
            best = scores.amax(-1, keepdim=True)
            weights = (scores - best).exp()
            total = weights.sum(-1, keepdim=True)
            answers.append(torch.bmm(weights.to(v.dtype), v[:, keys]) / total)
            log_sums.append(best + total.log())
        answer = torch.cat(answers, dim=1).to(v.dtype)  # (B·K, T·G, Dh)
        ctx.save_for_backward(q, k, v, bias, answer, torch.cat(log_sums, dim=1))
        ctx.n_kv_heads, ctx.group, ctx.window = n_kv_heads, group, window
        return _unstack(answer, n_kv_heads, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, answer, log_sums = ctx.saved_tensors
        n_kv_heads, group, window = ctx.n_kv_heads, ctx.group, ctx.window
        d_answer = _stack(gradients[0].to(v.dtype), n_kv_heads)  # (B·K, T·G, Dh)
        # Σ_s w_s · dw_s of a row, which the softmax takes off each dw.
        mean = (_wide(d_answer) * _wide(answer)).sum(-1, keepdim=True)
        d_queries = []
        d_k, d_v = torch.zeros_like(_wide(k)), torch.zeros_like(_wide(v))
        for begin in range(0, k.shape[1], BLOCK):
            rows, keys = slice(begin * group, (begin + BLOCK) * group), slice(*keys_of_block(begin, k.shape[1], window))
            scores = _scores(q[:, rows], k[:, keys], _bias_of(bias, begin, keys), n_kv_heads, group)
            weights = (scores - log_sums[:, rows]).exp()
            d_weights = _wide(torch.bmm(d_answer[:, rows], v[:, keys].transpose(1, 2)))
            d_scores = (weights * (d_weights - mean[:, rows]) / math.sqrt(q.shape[-1])).to(q.dtype)
            d_v[:, keys] += torch.bmm(weights.to(q.dtype).transpose(1, 2), d_answer[:, rows])
            d_k[:, keys] += torch.bmm(d_scores.transpose(1, 2), q[:, rows])
            d_queries.append(torch.bmm(d_scores, k[:, keys]))
        d_q = _unstack(torch.cat(d_queries, dim=1), n_kv_heads, group)
        return d_q, _unstack(d_k.to(k.dtype), n_kv_heads, 1), _unstack(d_v.to(v.dtype), n_kv_heads, 1), None, None


def _bias_of(bias: Tensor, begin: int, keys: slice) -> Tensor:
    """The part of the bias for a block of queries and its keys, (B or 1, rows, keys)."""
    if bias.dim() == 3:
        return bias[:, begin : begin + BLOCK, keys]
    diagonal = bias.shape[1] - BLOCK  # where the key at `begin` stands
    return bias[None, : keys.stop - begin, keys.start - begin + diagonal : keys.stop - begin + diagonal]


def _scores(q: Tensor, k: Tensor, bias: Tensor, n_kv_heads: int, group: int) -> Tensor:
    """The fp32 scores of one block of queries with the bias (B or 1, rows, keys) added, (B·K, rows·G, keys)."""
    scores = _wide(torch.bmm(q, k.transpose(1, 2))) / math.sqrt(q.shape[-1])
    shaped = scores.view(-1, n_kv_heads, bias.shape[1], group, k.shape[1])
    return (shaped + bias[:, None, :, None]).view_as(scores)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _stack(x: Tensor, n_kv_heads: int) -> Tensor:
    """(B, T, heads, Dh) -> (B·K, T·G, Dh): the heads that share a KV head become rows."""
    batch, length, heads, head_dim = x.shape
    x = x.view(batch, length, n_kv_heads, heads // n_kv_heads, head_dim).transpose(1, 2)  # (B, K, T, G, Dh)
    return x.reshape(batch * n_kv_heads, -1, head_dim)


def _unstack(x: Tensor, n_kv_heads: int, group: int) -> Tensor:
    """The reverse of `_stack`."""
    x = x.view(len(x) // n_kv_heads, n_kv_heads, -1, group, x.shape[-1]).transpose(1, 2)  # (B, T, K, G, Dh)
    return x.flatten(2, 3)
