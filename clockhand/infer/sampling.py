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

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.errors import ClockhandError
from clockhand.infer.settings import PLAIN, Sampling

Samplings = Sampling | Sequence[Sampling]
"""Of all rows, or one for each, of one `kind`."""
Number = float | Tensor
"""A setting of all rows, or one for each, (B, 1) in double."""


def next_token_probabilities(
    logits: Tensor, history: Sequence[Sequence[int]], sampling: Samplings, prompt_lengths: Sequence[int] | None = None
) -> Tensor:
    """What the next token is drawn from, (B, V) fp32, each row summing to 1.

    `logits` (B, V) may hold -inf for ids that must not be drawn. `history` has the ids of each row so far, prompt
    included and padding not; the first `prompt_lengths` of them are the prompt, which the presence and frequency
    penalties do not count. Raises `ClockhandError` when a row has NaN or +inf, or no id left to draw.
    """
    *_, (_, last) = stages(logits, history, sampling, prompt_lengths)
    return torch.softmax(last, dim=-1)


def stages(
    logits: Tensor, history: Sequence[Sequence[int]], sampling: Samplings, prompt_lengths: Sequence[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The logits (B, V) fp32 as the model gave them ("model"), and after every stage that is on, by its field's name.

    Arguments and refusals are those of `next_token_probabilities`, which is the softmax of the last.
    """
    logits = logits.float()
    _check_finite(logits.amax(-1))
    yield "model", logits
    each = [sampling] * len(logits) if isinstance(sampling, Sampling) else sampling
    sampling = each[0]  # which stages are on is the same in all
    if sampling.logit_bias:
        logits = add_logit_bias(logits, tuple(sampling.logit_bias))
        yield "logit_bias", logits
    if sampling.repetition_penalty != 1:
        logits = penalize_repetition(logits, history, _column(each, "repetition_penalty"))
        yield "repetition_penalty", logits
    if sampling.counts_drawn:
        if prompt_lengths is None:
            raise ValueError("presence and frequency penalties need prompt_lengths: what is prompt is not counted")
        drawn = [ids[length:] for ids, length in zip(history, prompt_lengths)]
        if sampling.presence_penalty != 0:
            logits = penalize_drawn(logits, drawn, presence=_column(each, "presence_penalty"))
            yield "presence_penalty", logits
        if sampling.frequency_penalty != 0:
            logits = penalize_drawn(logits, drawn, frequency=_column(each, "frequency_penalty"))
            yield "frequency_penalty", logits
    if sampling.temperature != 1:
        logits = apply_temperature(logits, _column(each, "temperature"))
        yield "temperature", logits
    if sampling.top_k:
        logits = keep_top_k(logits, _column(each, "top_k"))
        yield "top_k", logits
    if sampling.top_p != 1:
        logits = keep_top_p(logits, _column(each, "top_p"))
        yield "top_p", logits
    if sampling.min_p:
        logits = keep_min_p(logits, _column(each, "min_p"))
        yield "min_p", logits
    if sampling.typical_p != 1:
        logits = keep_typical(logits, _column(each, "typical_p"))
        yield "typical_p", logits


def _column(each: Sequence[Sampling], name: str) -> Number:
    """A setting of every row."""
    values = [getattr(one, name) for one in each]
    if values.count(values[0]) == len(values):
        return values[0]
    return torch.tensor(values, dtype=torch.float64)[:, None]  # (B, 1)


def sample(probabilities: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """One id a row, (B,) int64, from `probabilities` (B, V). Row b takes one number from generators[b] (on the CPU)."""
    return look_up(probabilities, draw_numbers(generators))


def best(
    logits: Tensor, history: Sequence[Sequence[int]], sampling: Samplings, prompt_lengths: Sequence[int] | None = None
) -> Tensor:
    """What is drawn at temperature 0, where all is on one id, (B,) int64: no probabilities and no random numbers.

    Arguments and refusals are those of `next_token_probabilities`.
    """
    if isinstance(sampling, Sampling):
        sampling = [sampling] * len(logits)
    if sampling[0].before_temperature is not PLAIN:
        before = [each.before_temperature for each in sampling]
        *_, (_, logits) = stages(logits, history, before, prompt_lengths)
    _check_finite(logits.amax(-1))
    # The first of equal ones, as in apply_temperature. numpy finds it in a sixth of the time.
    return torch.from_numpy(logits.float().numpy().argmax(-1)) if logits.is_cpu else logits.max(-1).indices


def _check_finite(highest: Tensor) -> None:
    """`highest` are the largest logits of rows: of one with NaN, NaN."""
    if not all(map(math.isfinite, highest.tolist())):
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


def _is(setting: Number, off: float) -> bool:
    return not isinstance(setting, Tensor) and setting == off


def _values(setting: Number, rows: int) -> list[float]:
    return setting.flatten().tolist() if isinstance(setting, Tensor) else [setting] * rows


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


def penalize_repetition(logits: Tensor, history: Sequence[Sequence[int]], penalty: Number) -> Tensor:
    """Divides the positive and multiplies the negative logits of ids in `history` by `penalty` (Keskar et al. 2019)."""
    if _is(penalty, 1):
        return logits
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(history):
        seen[row, list(ids)] = True
    by = penalty.to(logits.dtype) if isinstance(penalty, Tensor) else penalty
    return torch.where(seen, torch.where(logits > 0, logits / by, logits * by), logits)


def penalize_drawn(
    logits: Tensor, drawn: Sequence[Sequence[int]], presence: Number = 0.0, frequency: Number = 0.0
) -> Tensor:
    """logit - presence·[n > 0] - frequency·n for an id that is n times in its row of `drawn`: OpenAI's definition.

    https://platform.openai.com/docs/guides/text-generation, "frequency and presence penalties": tokens sampled so far
    count, those of the prompt do not.
    """
    penalty = torch.zeros_like(logits)
    rows = zip(drawn, _values(presence, len(drawn)), _values(frequency, len(drawn)))
    for row, (ids, for_presence, for_each) in enumerate(rows):
        for id, times in Counter(ids).items():
            penalty[row, id] = for_presence + for_each * times
    return logits - penalty


def apply_temperature(logits: Tensor, temperature: Number) -> Tensor:
    """logits / temperature, up to a constant a row; at 0 its limit, in which only the best token is left."""
    best, winner = logits.max(-1, keepdim=True)  # the first of equal ones
    if _is(temperature, 0):
        return torch.full_like(logits, -math.inf).scatter(-1, winner, 0.0)
    # With the best moved to 0 a tiny temperature sends the others to -inf, never anything to +inf. The smallest normal
    # number stands in for what fp32 would take for 0.
    tiny = torch.finfo(logits.dtype).tiny
    by = temperature.clamp(min=tiny).to(logits.dtype) if isinstance(temperature, Tensor) else max(temperature, tiny)
    return (logits - best) / by


def keep_top_k(logits: Tensor, k: Number) -> Tensor:
    """Exactly the k best stay; all of them when k is 0 or beyond the vocabulary."""
    ks = [min(int(value), logits.shape[-1]) for value in _values(k, len(logits))]
    if _is(k, 0) or min(ks) == logits.shape[-1]:
        return logits
    count = torch.tensor(ks, device=logits.device)[:, None]  # (B, 1)
    last = logits.topk(max(ks)).values.gather(-1, count - 1)  # (B, 1), in a fifth of the time that sorting all takes
    better, equal = logits > last, logits == last
    room = count - better.sum(-1, keepdim=True)
    return logits.masked_fill(~(better | equal & (equal.cumsum(-1) <= room)), -math.inf)


def keep_top_p(logits: Tensor, p: Number) -> Tensor:
    """The smallest set whose probabilities reach p stays, the best token always; all of them when p is 1."""
    if _is(p, 1):
        return logits
    return _keep_first(logits, p, -logits, _log_probabilities(logits))


def keep_min_p(logits: Tensor, p: Number) -> Tensor:
    """Those with a probability of at least p times the best one's stay; only the best, and its equals, when p is 1."""
    if _is(p, 0):
        return logits
    # Compared as logits, where p = 1 adds 0 and is exact.
    below = logits.new_tensor([math.log(value) for value in _values(p, len(logits))])[:, None]  # (B, 1)
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + below, -math.inf)


def keep_typical(logits: Tensor, p: Number) -> Tensor:
    """Locally typical sampling (Meister et al. 2022): tokens that surprise about as much as is to be expected.

    Ids are ordered by |-log q - H|, the distance of their surprise from the entropy H of the row, and the fewest whose
    probabilities reach p stay, the nearest always; all of them when p is 1. The best token may be out.
    """
    if _is(p, 1):
        return logits
    log_q = _log_probabilities(logits)
    entropy = torch.special.entr(log_q.to(logits.dtype).exp()).sum(-1, keepdim=True, dtype=torch.float64)  # (B, 1)
    return _keep_first(logits, p, (log_q + entropy).abs(), log_q)  # an id that is out is infinitely far


def _log_probabilities(logits: Tensor) -> Tensor:
    """(B, V) in double: their sums decide who is in. Of exponentials in the type of the logits, which take a tenth of
    the time: what they err by is lost in a sum over all but where it hits p, which is why that allows for rounding."""
    best = logits.amax(-1, keepdim=True)
    total = (logits - best).exp().sum(-1, keepdim=True, dtype=torch.float64)
    return logits.double() - (best.double() + total.log())


def _keep_first(logits: Tensor, p: Number, far: Tensor, log_q: Tensor) -> Tensor:
    """Of all ids in the order of `far` (B, V), equal ones in their own, the first whose probabilities reach p stay.

    Most texts have few likely ids: they are looked for among the `NEAREST`, which spares a row the sorting of all.
    """
    p = torch.tensor(_values(p, len(far)), dtype=torch.float64, device=far.device)[:, None]  # (B, 1)
    out = torch.ones_like(far, dtype=torch.bool)
    few = min(NEAREST, far.shape[-1])
    ids = far.topk(few, largest=False).indices.sort().values  # (B, few)
    near, order = far.gather(-1, ids).sort(dim=-1, stable=True)
    after = _after_reaching(p, log_q, ids := ids.gather(-1, order))
    # With those that are as far as the last, others may have been left out.
    unsettled = (~after & (near == near[:, -1:])).any(-1)
    out = out.scatter(-1, ids, after)
    if few < far.shape[-1] and unsettled.any():
        rows = slice(None) if unsettled.all() else unsettled
        ids = far[rows].argsort(dim=-1, stable=True)  # (b, V)
        out[rows] = out[rows].scatter(-1, ids, _after_reaching(p[rows], log_q[rows], ids))
    return logits.masked_fill(out, -math.inf)


NEAREST = 64
ROUNDING = 1e-7
"""The part by which fp32 logits and their exponentials may miss a sum of probabilities that is p exactly."""


def _after_reaching(p: Tensor, log_q: Tensor, ids: Tensor) -> Tensor:
    """For ids (B, n) in their order, whether those before each have reached p; never for the first."""
    reached = log_q.gather(-1, ids).exp().cumsum(-1)
    return F.pad(reached, (1, -1)) >= p * (1 - ROUNDING)
