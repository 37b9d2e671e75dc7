"""One text on its way through a model, with the logits after each of its ids: what checking a draft needs.

`PlainScorer` is the definition, a `Transformer` and a `KVCache`; a `Decoder` is the same, faster. `scorer_for` chooses.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from clockhand.infer.decode import decoder_for
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
        weight = model.token_embedding.weight
        self._model, self._chunk = model, chunk
        self._cache = KVCache(model.config, 1, reach, weight.dtype, weight.device)

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


def scorer_for(model: Transformer, reach: int, new_tokens: int, chunk: int = CHUNK, plain: bool = False) -> Scorer:
    """A scorer for a text of up to `reach` tokens, `new_tokens` of them new: the compiled one if that is the faster way
    (`decoder_for`) and it need not be `plain`."""
    decoder = None if plain else decoder_for(model, reach, new_tokens)
    return PlainScorer(model, reach, chunk) if decoder is None else decoder
