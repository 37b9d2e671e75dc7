"""How one token is drawn: the scores of the model become probabilities, and a number drawn at random picks an id.

    logits ─ penalize_repetition ─ apply_temperature ─ keep_top_k ─ keep_top_p ─ keep_min_p ─ softmax ─ draw

This order (transformers has the same) is part of the definition: each stage reads what the one before it left, so the
nucleus of top-p is measured after the temperature has sharpened or flattened, and among the k that top-k has kept.

Every stage is a pure function of logits (B, V) that looks at each row alone, and an id that is out has logit -inf.
Where logits are equal the smaller id goes first, so nothing depends on how a sort breaks ties.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.errors import ClockhandError
from clockhand.infer.settings import Sampling


def next_token_probabilities(logits: Tensor, history: Sequence[Sequence[int]], sampling: Sampling) -> Tensor:
    """What the next token is drawn from, (B, V) fp32, each row summing to 1.

    `logits` (B, V) may hold -inf for ids that must not be drawn. `history` has the ids of each row so far, prompt
    included and padding not. Raises `ClockhandError` when a row has NaN or +inf, or no id left to draw.
    """
    logits = logits.float()
    if not logits.amax(-1).isfinite().all():  # the maximum of a row with NaN is NaN
        raise ClockhandError(
            "the model's logits hold NaN or infinity, and no token can be drawn: its weights are broken"
        )
    logits = penalize_repetition(logits, history, sampling.repetition_penalty)
    logits = apply_temperature(logits, sampling.temperature)
    logits = keep_top_k(logits, sampling.top_k)
    logits = keep_top_p(logits, sampling.top_p)
    logits = keep_min_p(logits, sampling.min_p)
    return torch.softmax(logits, dim=-1)


def sample(probabilities: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One id a row, (B,) int64, from `probabilities` (B, V). Row b takes one number from generators[b] (on the CPU).

    The probabilities are laid end to end on a line of length 1, and the number says where on it to look: so a row's
    draw depends on nothing but its probabilities and its generator, and an id of probability 0 is never met.
    """
    line = probabilities.double().cumsum(-1)  # (B, V), in double so that a long tail of small numbers counts
    drawn = [torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators]
    where = torch.stack(drawn).to(line.device) * line[:, -1:]  # (B, 1), below the end of the line
    return torch.searchsorted(line, where, right=True).squeeze(-1)


def penalize_repetition(logits: Tensor, history: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Divides the positive and multiplies the negative logits of ids in `history` by `penalty` (Keskar et al. 2019)."""
    if penalty == 1:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(history):
        seen[row, list(ids)] = True
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature, up to a constant a row; at 0 its limit, in which only the best token is left."""
    best, winner = logits.max(-1, keepdim=True)  # the first of equal ones
    if temperature == 0:
        return torch.full_like(logits, -math.inf).scatter(-1, winner, 0.0)
    # With the best moved to 0 a tiny temperature sends the others to -inf, never anything to +inf. The smallest normal
    # number stands in for what fp32 would take for 0.
    return (logits - best) / max(temperature, torch.finfo(logits.dtype).tiny)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Exactly the k best stay; all of them when k is 0 or beyond the vocabulary."""
    if k == 0:
        return logits
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[:, k:], -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set whose probabilities reach p stays, the best token always; all of them when p is 1."""
    if p == 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    reached = torch.softmax(ordered.double(), dim=-1).cumsum(-1)  # (B, V), in double: the sums decide who is in
    before = F.pad(reached, (1, -1))  # what the better tokens have reached without this one
    return logits.scatter(-1, order, ordered.masked_fill(before >= p, -math.inf))


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Those with a probability of at least p times the best one's stay; only the best, and its equals, when p is 1."""
    if p == 0:
        return logits
    # Compared as logits, where p = 1 adds 0 and is exact.
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)
