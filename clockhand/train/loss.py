"""What a language model is punished for: cross-entropy of the next token, over the tokens that have one.

A position has no next token to learn at the end of a row, before padding, and where the next token begins another
document; its target is `IGNORE_INDEX`. A mean over rows, or over micro-batches, of their means would weigh tokens by
how few their neighbours are, so everything here is a sum together with a count: whoever accumulates divides once, by
the number of targets of all the micro-batches together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.data.loader import IGNORE_INDEX, Batch
from clockhand.model.transformer import Transformer


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


def batch_loss(model: Transformer, batch: Batch, dtype: str = "float32") -> tuple[SummedLoss, Tensor]:
    """The language-model loss of one batch, and the balance loss (scalar, 0 for a dense model).

    With dtype "bfloat16" the matrix products of the model run in it; weights and loss stay in fp32.
    """
    device = next(model.parameters()).device
    documents = None if batch.documents is None else batch.documents.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        logits, balance_loss = model(batch.ids.to(device), documents=documents)
    return cross_entropy(logits, batch.targets.to(device)), balance_loss
