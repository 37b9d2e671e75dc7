"""One text on its way through a model, with the logits after each of its ids: what checking a draft needs.

`PlainScorer` is the definition, a `Transformer` and a `KVCache`. `FusedScorer` takes the step of many streams: the ids
of a draft are rows of it, each of which sees those before it, and cost little more than one. A `Decoder`, faster with
one id and slower with several, is there for what cannot be fused. `scorer_for` chooses.
"""

import sys
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from clockhand.errors import ClockhandError
from clockhand.infer.decode import decoder_for
from clockhand.infer.fused import FusedRunner, is_fusible, is_step_compiled, is_worth_compiling
from clockhand.infer.graphs import compiler
from clockhand.infer.scheduler import Row
from clockhand.model.cache import KVCache
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


class FusedScorer:
    """A `Scorer` by the compiled step of a `FusedRunner`, for models that are `is_fusible`."""

    def __init__(self, model: Transformer, reach: int) -> None:
        """Raises `ClockhandError` as `FusedRunner` does where its step has to be compiled."""
        self._runner = FusedRunner(model, 2, reach, min(CHUNK, reach), compile=True)
        self._text, self._beside = self._runner.text(0), self._runner.text(1)

    @property
    def length(self) -> int:
        return int(self._text.lengths)

    def extend(self, ids: Sequence[int]) -> Tensor:
        if len(ids) == 1:
            # The step is for two rows and more. The other one begins a text, so that it looks at nothing but itself.
            logits = self._runner.run([Row(0, list(ids), self.length), Row(1, list(ids), 0)])
            self._beside.truncate(0)
            return logits[0]
        logits = torch.empty(0)
        for start in range(0, len(ids), CHUNK):
            logits = self._runner.run([Row(0, list(ids[start : start + CHUNK]), self.length)])
        return logits[0]

    def score(self, ids: Sequence[int]) -> Tensor:
        return self._runner.score(0, ids) if len(ids) > 1 else self.extend(ids)[None]

    def can_truncate(self, length: int) -> bool:
        return self._text.can_truncate(length)

    def truncate(self, length: int) -> None:
        self._text.truncate(length)


def scorer_for(model: Transformer, reach: int, new_tokens: int, chunk: int = CHUNK, plain: bool = False) -> Scorer:
    """A scorer for a text of up to `reach` tokens, `new_tokens` of them new: one whose step is compiled where that lies
    in the cache folder or so many tokens repay it, unless it must be `plain`."""
    if plain:
        return PlainScorer(model, reach, chunk)
    if is_fusible(model) and (
        is_step_compiled(model) or (is_worth_compiling(model.config, new_tokens) and compiler() is not None)
    ):
        try:
            return FusedScorer(model, reach)
        except ClockhandError as error:  # the cache folder cannot be written, say
            print(f"note: {error}: drafts are checked the plain, slower way", file=sys.stderr)
            return PlainScorer(model, reach, chunk)
    return decoder_for(model, reach, new_tokens) or PlainScorer(model, reach, chunk)
