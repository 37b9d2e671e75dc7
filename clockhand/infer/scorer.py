"""One text on its way through a model, with the logits after each of its ids: what checking a draft needs.

`PlainScorer` is the definition, a `Transformer` and a `KVCache`; `StepScorer` takes the step in C++.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from clockhand.infer.kernels.runner import step_runner
from clockhand.infer.routes import route_of
from clockhand.model.cache import SLACK, KVCache
from clockhand.model.transformer import Transformer

CHUNK = 512
"""Ids that one call of the plain model reads."""


class Scorer(Protocol):
    """A text that can be appended to and cut back."""

    @property
    def length(self) -> int:
        """Tokens held."""

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids`; the logits after the last, (V,) fp32 on the CPU."""

    def score(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids`; the logits after each, (T, V) fp32 on the CPU."""

    def can_truncate(self, length: int) -> bool:
        """Whether `truncate(length)` leaves what the next token will look back on."""

    def truncate(self, length: int) -> None:
        """Forgets every token at position `length` and beyond."""


class PlainScorer:
    """The definition of a `Scorer`."""

    def __init__(self, model: Transformer, reach: int, chunk: int = CHUNK) -> None:
        self._model, self._chunk = model, chunk
        self._cache = KVCache(model.config, 1, reach, model.dtype, model.device)

    @property
    def length(self) -> int:
        return int(self._cache.lengths)

    def extend(self, ids: Sequence[int]) -> Tensor:
        return self._logits(ids, 1)[0]

    def score(self, ids: Sequence[int]) -> Tensor:
        return self._logits(ids, len(ids))

    @torch.no_grad()
    def _logits(self, ids: Sequence[int], last: int) -> Tensor:
        """The logits after the `last` of `ids`, which one call reads whatever their number: (last, V)."""
        numbers = torch.tensor([ids], device=self._cache.lengths.device)
        *before, end = numbers.split(max(self._chunk, last), dim=1)
        for chunk in before:
            self._model.hidden(chunk, cache=self._cache)
        hidden = self._model.hidden(end, cache=self._cache).hidden[0, -last:]  # (last, D)
        return self._model.lm_head(hidden).float().cpu()

    def can_truncate(self, length: int) -> bool:
        return self._cache.can_truncate(length)

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)


class StepScorer:
    """A `Scorer` by the step in C++: the ids of a draft are rows of one text, and cost little more than one."""

    def __init__(self, model: Transformer, reach: int, chunk: int = CHUNK) -> None:
        self._chunk = min(max(chunk, SLACK + 1), CHUNK, reach)
        self._runner = step_runner(model, 1, reach, self._chunk)
        self._runner.open(0, 0, 0, reach)

    @property
    def length(self) -> int:
        return self._runner.length(0)

    def extend(self, ids: Sequence[int]) -> Tensor:
        logits = torch.empty(0)
        for start in range(0, len(ids), self._chunk):
            logits = self._runner.append(0, ids[start : start + self._chunk])
        return logits

    def score(self, ids: Sequence[int]) -> Tensor:
        return torch.cat([self._runner.score(0, ids[at : at + self._chunk]) for at in range(0, len(ids), self._chunk)])

    def can_truncate(self, length: int) -> bool:
        return self._runner.can_truncate(0, length)

    def truncate(self, length: int) -> None:
        self._runner.truncate(0, length)


def scorer_for(model: Transformer, reach: int, chunk: int = CHUNK, plain: bool = False) -> Scorer:
    """A scorer for a text of up to `reach` tokens, by the way that `routes.py` chooses."""
    if route_of(model, plain=plain).name == "step":
        return StepScorer(model, reach, chunk)
    return PlainScorer(model, reach, chunk)
