"""How probable the model itself found a token: the log-softmax of its logits, before any stage of sampling.

Temperature, penalties, biases and what is kept change what is drawn, never these numbers. They are natural logarithms
over the model's whole vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLogprob:
    """One token as the model saw it coming."""

    id: int
    logprob: float
    """In nats, 0 at most."""
    top: tuple[tuple[int, float], ...]
    """The best ids with their logprobs, best first: as many as were asked for."""


def token_logprobs(
    logits: Tensor, ids: Sequence[int], top: int = 0, known_ids: int | None = None
) -> list[TokenLogprob]:
    """For each row of `logits` (B, V) what it said of the id that followed, and of the `top` best ones.

    Ids from `known_ids` on, with which a vocabulary may be padded, have their share but are not listed.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(ids, dtype=torch.int64, device=logprobs.device)[:, None])[:, 0].tolist()
    if not top:
        return [TokenLogprob(id, logprob, ()) for id, logprob in zip(ids, chosen)]
    listed = logprobs[:, :known_ids]
    order = listed.argsort(dim=-1, descending=True, stable=True)[:, :top]  # of equal ones the smaller id
    best = listed.gather(-1, order)
    return [
        TokenLogprob(id, logprob, tuple(zip(ids_of_row, logprobs_of_row)))
        for id, logprob, ids_of_row, logprobs_of_row in zip(ids, chosen, order.tolist(), best.tolist())
    ]
