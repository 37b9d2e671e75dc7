"""What rounding the weights costs: predictions in fp32 beside those of a precision, in nats between them.

    KL = Σ p · (ln p - ln q)      p of the model in fp32, q of its rounded twin; 0 where nothing has changed

Only matrices are rounded: norms, biases, an expert's router and all arithmetic stay as they were. A row of the
embedding is looked up in the same numbers that the head multiplies by. For one stream the machine reads every weight
once a token, so the bytes decide the speed, and this tells the price.

The formats themselves are in `model/packed.py`, how their numbers are multiplied at speed in `kernels/`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from clockhand.data.loader import Batch
from clockhand.errors import ClockhandError
from clockhand.model.packed import pack, unpack
from clockhand.model.transformer import Transformer
from clockhand.train.evaluate import perplexity
from clockhand.train.loss import IGNORE_INDEX

_POSITIONS_AT_ONCE = 256  # whose V logits of both models are in memory


def rounded(model: Transformer, precision: str) -> Transformer:
    """A copy of `model` in fp32 whose matrices hold what `precision` leaves of them: what `packed` must equal."""
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
    """What rounding costs, over all targets of a text."""

    tokens: int
    kl: float
    """Mean Kullback-Leibler distance of the rounded model's prediction from the other's, in nats a token."""
    perplexity: float
    perplexity_against: float


@torch.no_grad()
def compare(model: Transformer, against: Transformer, batches: Iterable[Batch]) -> Quality:
    """The predictions of `model` beside those of `against`, the p of the formula, at every target of `batches`.

    Raises `ClockhandError` for models of different vocabularies, and where there is no target.
    """
    sizes = [each.config.vocab_size for each in (model, against)]
    if sizes[0] != sizes[1]:
        raise ClockhandError(f"predictions over {sizes[0]} and {sizes[1]} ids cannot be compared")
    tokens, kl, nats, nats_against = 0, 0.0, 0.0, 0.0
    for batch in batches:
        counted = batch.targets != IGNORE_INDEX  # (B, T)
        hidden = [each.eval().hidden(batch.ids, documents=batch.documents).hidden[counted] for each in (against, model)]
        targets = batch.targets[counted]
        for start in range(0, len(targets), _POSITIONS_AT_ONCE):
            part = slice(start, start + _POSITIONS_AT_ONCE)
            p, q = (
                each.lm_head(states[part]).double().log_softmax(-1) for each, states in zip((against, model), hidden)
            )  # each (t, V)
            kl += float((p.exp() * (p - q)).sum())
            nats -= float(q.gather(-1, targets[part, None]).sum())
            nats_against -= float(p.gather(-1, targets[part, None]).sum())
        tokens += len(targets)
    if not tokens:
        raise ClockhandError("nothing to compare on: there is no target")
    return Quality(tokens, kl / tokens, perplexity(nats / tokens), perplexity(nats_against / tokens))
