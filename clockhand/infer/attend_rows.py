"""The attention of many streams: each row looks over the keys and values in its slot of the cache.

attend_rows       in C++ (`attend_rows.cpp`): one pass of the threads, and each row only as far as it reaches
attend_in_torch   for all other machines; compiled, a few loops
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.infer.block import stored
from clockhand.infer.native import call, native, operator

AttendRows = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""q (n, H, Dh), keys and values (slots, capacity, K, Dh), slots (n,), seen (n, S) -> (n, H, Dh).

Each row attends to those of the first S places of its slot where `seen` (fp32) is 0; where it is -inf it does not.
"""


def fastest_attend(dtype: torch.dtype) -> AttendRows:
    """That of this machine, for queries, keys and values in `dtype`."""
    return attend_in_torch if native() is None or dtype not in (torch.float32, torch.bfloat16) else attend_rows


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
    attend = _operator if torch.compiler.is_compiling() else _attend
    return attend(q.contiguous(), keys, values, slots, seen.contiguous())


def _attend(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
    attended = torch.empty_like(q)
    sizes = [*q.shape[:2], keys.shape[2], q.shape[2], keys.shape[1], seen.shape[1]]
    call("attend_rows", [q, keys, values, slots, seen, attended], sizes, q.dtype == torch.bfloat16)
    return attended


_operator = operator("attend_rows", _attend, lambda q, *others: torch.empty_like(q))


def attend_in_torch(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
    places = torch.arange(seen.shape[1])
    keys, values = (each[slots[:, None], places].transpose(1, 2) for each in (keys, values))  # (n, K, S, Dh)
    q = q.unflatten(1, (keys.shape[1], -1))  # (n, K, G, Dh)
    if not torch.compiler.is_compiling():
        mask = seen[:, None, None].to(q.dtype)  # (n, 1, 1, S)
        return F.scaled_dot_product_attention(q.to(keys.dtype), keys, values, attn_mask=mask).flatten(1, 2)
    group = range(q.shape[2])
    # Bare sums: what else is done to them would be a loop of its own for each of the group.
    products = [(keys.float() * q[:, :, g, None].float()).sum(-1) for g in group]  # each (n, K, S)
    score = stored(torch.stack(products, dim=1)) / math.sqrt(q.shape[-1]) + seen[:, None, None]  # (n, G, K, S)
    weight = stored(torch.softmax(score, dim=-1))
    mixed = [(weight[:, g, :, :, None] * values.float()).sum(2) for g in group]  # each (n, K, Dh)
    return stored(torch.stack(mixed, dim=2).to(q.dtype)).flatten(1, 2)
