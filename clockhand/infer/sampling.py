"""How one token is drawn: the scores of the model become probabilities, and a number drawn at random picks an id.

    logits ─ add_logit_bias ─ penalize_repetition ─ penalize_drawn ─ apply_temperature
           ─ keep_top_k ─ keep_top_p ─ keep_min_p ─ keep_typical ─ softmax ─ draw

This order (transformers has the same) is part of the definition: each stage reads what the one before it left, so the
nucleus of top-p is measured after the temperature has sharpened or flattened, and among the k that top-k has kept.
`stages` is that line, one stage after another, for whoever wants to watch.

Every stage is a pure function of logits (B, V) that looks at each row alone, and an id that is out has logit -inf.
Where several ids are equally good the smaller one goes first, so nothing depends on how a sort breaks ties.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.errors import ClockhandError
from clockhand.infer.settings import PLAIN, Sampling


def next_token_probabilities(
    logits: Tensor, history: Sequence[Sequence[int]], sampling: Sampling, prompt_lengths: Sequence[int] | None = None
) -> Tensor:
    """What the next token is drawn from, (B, V) fp32, each row summing to 1.

    `logits` (B, V) may hold -inf for ids that must not be drawn. `history` has the ids of each row so far, prompt
    included and padding not; the first `prompt_lengths` of them are the prompt, which the presence and frequency
    penalties do not count. Raises `ClockhandError` when a row has NaN or +inf, or no id left to draw.
    """
    *_, (_, last) = stages(logits, history, sampling, prompt_lengths)
    return torch.softmax(last, dim=-1)


def stages(
    logits: Tensor, history: Sequence[Sequence[int]], sampling: Sampling, prompt_lengths: Sequence[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The logits (B, V) fp32 as the model gave them ("model"), and after every stage that is on, by its field's name.

    Arguments and refusals are those of `next_token_probabilities`, which is the softmax of the last.
    """
    logits = logits.float()
    _check_finite(logits.amax(-1))
    yield "model", logits
    if sampling.logit_bias:
        logits = add_logit_bias(logits, tuple(sampling.logit_bias))
        yield "logit_bias", logits
    if sampling.repetition_penalty != 1:
        logits = penalize_repetition(logits, history, sampling.repetition_penalty)
        yield "repetition_penalty", logits
    if sampling.counts_drawn:
        if prompt_lengths is None:
            raise ValueError("presence and frequency penalties need prompt_lengths: what is prompt is not counted")
        drawn = [ids[length:] for ids, length in zip(history, prompt_lengths)]
        if sampling.presence_penalty != 0:
            logits = penalize_drawn(logits, drawn, presence=sampling.presence_penalty)
            yield "presence_penalty", logits
        if sampling.frequency_penalty != 0:
            logits = penalize_drawn(logits, drawn, frequency=sampling.frequency_penalty)
            yield "frequency_penalty", logits
    if sampling.temperature != 1:
        logits = apply_temperature(logits, sampling.temperature)
        yield "temperature", logits
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
        yield "top_k", logits
    if sampling.top_p != 1:
        logits = keep_top_p(logits, sampling.top_p)
        yield "top_p", logits
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
        yield "min_p", logits
    if sampling.typical_p != 1:
        logits = keep_typical(logits, sampling.typical_p)
        yield "typical_p", logits


def sample(probabilities: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One id a row, (B,) int64, from `probabilities` (B, V). Row b takes one number from generators[b] (on the CPU)."""
    return look_up(probabilities, draw_numbers(generators))


def best(
    logits: Tensor, history: Sequence[Sequence[int]], sampling: Sampling, prompt_lengths: Sequence[int] | None = None
) -> Tensor:
    """What is drawn at temperature 0, where all is on one id, (B,) int64: no probabilities and no random numbers.

    Arguments and refusals are those of `next_token_probabilities`.
    """
    before = _before_temperature(sampling)
    if before != PLAIN:
        *_, (_, logits) = stages(logits, history, before, prompt_lengths)
    highest, ids = logits.max(-1)  # the first of equal ones, as in apply_temperature
    _check_finite(highest)
    return ids


@lru_cache(1024)
def _before_temperature(sampling: Sampling) -> Sampling:
    """The stages up to it. From there on they keep the best, whatever else they take out."""
    return replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)


def _check_finite(highest: Tensor) -> None:
    """`highest` are the largest logits of rows: of one with NaN, NaN."""
    if not highest.isfinite().all():
        raise ClockhandError(
            "the model's logits hold NaN or infinity, and no token can be drawn: its weights are broken"
        )


def draw_numbers(generators: Sequence[torch.Generator]) -> Tensor:
    """One number of each generator, (B,) float64, from 0 up to but not 1."""
    return torch.cat([torch.rand(1, dtype=torch.float64, generator=generator) for generator in generators])


def look_up(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The id of each row that its number (B,) points at, (B,) int64, in `probabilities` (B, V).

    The probabilities are laid end to end on a line of length 1, and the number says where on it to look: so a row's
    draw depends on nothing but its probabilities and its generator, and an id of probability 0 is never met.
    """
    line = probabilities.double().cumsum(-1)  # (B, V), in double so that a long tail of small numbers counts
    where = numbers.to(line.device)[:, None] * line[:, -1:]  # (B, 1), below the end of the line
    return torch.searchsorted(line, where, right=True).squeeze(-1)


def add_logit_bias(logits: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """Adds to the logit of each id its bias. Raises `ClockhandError` for ids there are not, and where none is left."""
    for id, _ in bias:
        if id >= logits.shape[-1]:
            raise ClockhandError(f"logit_bias of id {id} is outside the vocabulary of {logits.shape[-1]} ids")
    added = torch.zeros_like(logits[0])  # (V,)
    added[[id for id, _ in bias]] = added.new_tensor([value for _, value in bias])
    biased = logits + added
    if (biased.amax(-1) == -math.inf).any():
        raise ClockhandError("logit_bias forbids every token that could be drawn")
    return biased


def penalize_repetition(logits: Tensor, history: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Divides the positive and multiplies the negative logits of ids in `history` by `penalty` (Keskar et al. 2019)."""
    if penalty == 1:
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(history):
        seen[row, list(ids)] = True
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalized, logits)


def penalize_drawn(
    logits: Tensor, drawn: Sequence[Sequence[int]], presence: float = 0.0, frequency: float = 0.0
) -> Tensor:
    """logit - presence·[n > 0] - frequency·n for an id that is n times in its row of `drawn`: OpenAI's definition.

    https://platform.openai.com/docs/guides/text-generation, "frequency and presence penalties": tokens sampled so far
    count, those of the prompt do not.
    """
    penalty = torch.zeros_like(logits)
    for row, ids in enumerate(drawn):
        for id, times in Counter(ids).items():
            penalty[row, id] = presence + frequency * times
    return logits - penalty


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
    if k >= logits.shape[-1]:
        return logits
    last = logits.topk(k).values[:, -1:]  # (B, 1), in a fifth of the time that sorting all takes
    better, equal = logits > last, logits == last
    room = k - better.sum(-1, keepdim=True)
    return logits.masked_fill(~(better | equal & (equal.cumsum(-1) <= room)), -math.inf)


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


def keep_typical(logits: Tensor, p: float) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens that surprise about as much as is to be expected.

    Ids are ordered by |-log q - H|, the distance of their surprise from the entropy H of the row, and the fewest whose
    probabilities reach p stay, the nearest always; all of them when p is 1. The best token may be out.
    """
    if p == 1:
        return logits
    log_q = torch.log_softmax(logits.double(), dim=-1)
    q = log_q.exp()
    entropy = torch.special.entr(q).sum(-1, keepdim=True)  # (B, 1), with 0 · log 0 = 0
    order = (log_q + entropy).abs().argsort(dim=-1, stable=True)  # an id that is out is infinitely far
    reached = q.gather(-1, order).cumsum(-1)
    out = F.pad(reached, (1, -1)) >= p  # in that order, as in keep_top_p
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -math.inf)
