"""What a language model is punished for: cross-entropy of the next token, over the tokens that have one.

A position has no next token to learn at the end of a row, before padding, and where the next token begins another
document; its target is `IGNORE_INDEX`. A mean over rows, or over micro-batches, of their means would weigh tokens by
how few their neighbours are, so everything here is a sum together with a count: whoever accumulates divides once, by
the number of targets of all the micro-batches together.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from clockhand.data.loader import IGNORE_INDEX, Batch
from clockhand.model.packed import weight_of
from clockhand.model.transformer import Transformer

LOGITS_AT_ONCE = 2**22
"""Logits that `linear_cross_entropy` holds at a time: 16 MiB of fp32, about what a CPU's last cache holds."""


@dataclass(frozen=True)
class SummedLoss:
    total: Tensor
    """Scalar fp32: sum of -ln p(target), in nats."""
    count: int
    """How many targets were summed."""

    @property
    def mean(self) -> Tensor:
        """Nats per target. With no target it is 0, still joined to the graph: every gradient is then 0, not NaN."""
        return self.total / max(self.count, 1)


def next_token_targets(
    ids: Tensor,  # (B, T) int64
    documents: Tensor | None = None,  # (B, T), equal within a document
    is_token: Tensor | None = None,  # (B, T) bool, false at padding
) -> Tensor:
    """What each position must predict, (B, T): the next id, or `IGNORE_INDEX` where there is none to learn."""
    targets = torch.full_like(ids, IGNORE_INDEX)
    targets[:, :-1] = ids[:, 1:]
    if documents is not None:
        targets[:, :-1].masked_fill_(documents[:, 1:] != documents[:, :-1], IGNORE_INDEX)
    if is_token is not None:
        both = is_token[:, 1:].bool() & is_token[:, :-1].bool()
        targets[:, :-1].masked_fill_(~both, IGNORE_INDEX)
    return targets


def count_targets(targets: Tensor) -> int:
    return int((targets != IGNORE_INDEX).sum())


def cross_entropy(logits: Tensor, targets: Tensor) -> SummedLoss:
    """-Σ ln softmax(logits)[target] over the targets that are not `IGNORE_INDEX`.

    logits (..., V) of any precision, targets (...); the softmax is taken in fp32 (or fp64 for fp64 logits).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return SummedLoss(total, count_targets(targets))


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> SummedLoss:
    """`cross_entropy(hidden @ weight.T, targets)` without ever holding all logits.

    hidden (..., D), weight (V, D), targets (...). Some rows of logits at a time are made, taken into the sum, turned
    into their own gradient where they stand and forgotten, so the memory is that of one chunk, whatever B, T and V are.
    Products are in autocast's type where it is on, everything else in fp32 (fp64 for fp64).
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Asked here: within, no gradients are kept in any case, and a weight wants one even where nobody will take it.
    learning = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    total = _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), dtype, learning)
    return SummedLoss(total, count_targets(targets))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, learning: bool
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        h, w = hidden.to(dtype), weight.to(dtype)
        if learning:
            d_hidden, d_weight = torch.empty_like(h), torch.zeros_like(weight, dtype=wide)
            part_of_d_weight = torch.empty_like(w)
        total = torch.zeros((), dtype=wide, device=h.device)
        chunk = min(max(LOGITS_AT_ONCE // len(w), 1), len(h))
        # One place each for all chunks: what glibc gets back between two of them it cannot use for the next.
        all_logits = h.new_empty(chunk, len(w))
        all_log_p = h.new_empty(chunk, len(w), dtype=wide)
        for begin in range(0, len(h), chunk):
            rows = h[begin : begin + chunk]
            logits, log_p = all_logits[: len(rows)], all_log_p[: len(rows)]  # (N, V)
            learned = (targets[begin : begin + chunk] != IGNORE_INDEX)[:, None]  # (N, 1)
            target = targets[begin : begin + chunk, None].clamp(min=0)
            torch.mm(rows, w.T, out=logits)
            torch.log_softmax(logits, -1, dtype=wide, out=log_p)
            total -= (log_p.gather(-1, target) * learned).sum()
            if learning:
                slope = log_p.exp_()  # p, and at the target p - 1
                slope.scatter_add_(-1, target, slope.new_full(target.shape, -1))
                if not learned.all():
                    slope.masked_fill_(~learned, 0)
                slope = slope if dtype == wide else logits.copy_(slope)
                torch.mm(slope, w, out=d_hidden[begin : begin + chunk])
                d_weight += torch.mm(slope.T, rows, out=part_of_d_weight)
        if learning:
            ctx.save_for_backward(d_hidden.to(hidden.dtype), d_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradients[0].to(d_hidden.dtype), d_weight * gradients[0], None, None, None


def batch_loss(model: Transformer, batch: Batch, dtype: str = "float32") -> tuple[SummedLoss, Tensor]:
    """The language-model loss of one batch, and the balance loss (scalar, 0 for a dense model).

    With dtype "bfloat16" the matrix products of the model run in it; weights and loss stay in fp32.
    """
    device = next(model.parameters()).device
    documents = None if batch.documents is None else batch.documents.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        hidden, balance_loss = model.hidden(batch.ids.to(device), documents=documents)
        return linear_cross_entropy(hidden, weight_of(model.lm_head), batch.targets.to(device)), balance_loss
