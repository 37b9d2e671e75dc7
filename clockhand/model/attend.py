"""Who sees whom, and what comes of it: the part of attention that has no weights.

A mask is a rule on positions, never on indices into the cache. The query at position p sees the key at position s when

    s <= p                 nothing from the future
    s >= 0                 -1 marks padding
    p - s < window         inside the sliding window, if there is one
    same document          if a row packs several

One rule serves training, a whole prompt, several new tokens on a warm cache, left padding and packed documents. (The
familiar shortcut, "causal unless there is a cache", is wrong twice: for a first call with an empty cache, and for
several tokens on a warm one.)

`attend_reference` is the definition. `attend` takes a fast route, tested equal to it: torch's fused kernel, or inside a
compiled block on a CPU the large matrix products of `attend_blocks.py`.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.model.attend_blocks import as_bias, attend_blocks, strip


@dataclass(frozen=True)
class Visibility:
    """The rule for one call. It is built once and shared by all layers."""

    query_positions: Tensor  # (B, T)
    key_positions: Tensor  # (B, S)
    window: int = 0
    query_documents: Tensor | None = None  # (B, T)
    key_documents: Tensor | None = None  # (B, S)
    plainly_causal: bool = False
    """Known without looking at the values: T = S, both count 0, 1, 2, ..., one document, no window in reach."""
    in_order: bool = False
    """Known likewise: T = S, and no query sees a key behind itself in the row."""

    @property
    def rows_alike(self) -> bool:
        """Whether all rows count 0, 1, 2, ... as one document each: then one row's rule is that of all."""
        return self.in_order and self.query_documents is None

    @cached_property
    def mask(self) -> Tensor:
        """(B, T, S) bool, or (1, T, S) for rows that are alike: True where the query sees the key.

        A padding query (position -1) sees everything: its output means nothing, but a softmax over nothing is NaN,
        and NaN spreads through gradients even where it is multiplied by zero.
        """
        rows = slice(1) if self.rows_alike else slice(None)
        query, key = self.query_positions[rows, :, None], self.key_positions[rows, None, :]
        seen = (key <= query) & (key >= 0)
        if self.window:
            seen &= query - key < self.window
        if self.query_documents is not None and self.key_documents is not None:
            seen &= self.query_documents[:, :, None] == self.key_documents[:, None, :]
        return seen | (query < 0)

    @cached_property
    def bias(self) -> Tensor:
        """The mask as `attend_blocks` adds it: whole, (B, T, S), or only a strip of it for rows that are alike."""
        if self.rows_alike:
            return strip(self.query_positions.shape[1], self.window, self.query_positions.device)
        return as_bias(self.mask)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, sees: Visibility, scale: float | None = None) -> Tensor:
    """softmax(q·kᵀ/√Dh + mask)·v with the softmax in fp32. The definition.

    q (B, T, H, Dh), k and v (B, S, K, Dh) -> (B, T, H, Dh). Query head h reads KV head h // G, where G = H/K.
    `scale` replaces 1/√Dh (to show what happens without it).
    """
    batch, queries, n_heads, head_dim = q.shape
    n_kv_heads = k.shape[2]
    q = q.reshape(batch, queries, n_kv_heads, n_heads // n_kv_heads, head_dim)  # (B, T, K, G, Dh)
    scores = torch.einsum("btkgd,bskd->bkgts", q, k) * (1 / math.sqrt(head_dim) if scale is None else scale)
    scores = scores.masked_fill(~sees.mask[:, None, None], -math.inf)
    weights = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), dim=-1).to(v.dtype)
    return torch.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, queries, n_heads, head_dim)


def attend(q: Tensor, k: Tensor, v: Tensor, sees: Visibility, scale: float | None = None) -> Tensor:
    """`attend_reference` by a fast route, without the (T, S) scores of every head in memory."""
    if torch.compiler.is_compiling() and q.device.type == "cpu" and scale is None and sees.in_order:
        return attend_blocks(q, k, v, sees.bias, sees.window)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, heads, T or S, Dh)
    mask = None if sees.plainly_causal else sees.mask[:, None]  # (B or 1, 1, T, S)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=sees.plainly_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)  # (B, T, H, Dh)
