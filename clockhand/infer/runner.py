"""What the engine computes with: rows of ids go in, the logits after each row's last id come out.

`Runner` is all that the engine asks for. `ReferenceRunner` is the plain one, a `Transformer` and a `KVCache` of one row
a slot: rows of one id run as one batch, in which idle slots are padding, and every longer row runs alone, so that
nobody is padded to its width. `fused.py` has a faster step for many.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from clockhand.infer.scheduler import Row
from clockhand.model.cache import KVCache, row_capacity
from clockhand.model.transformer import Transformer


class Runner(Protocol):
    """A model with memory for so many slots."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, all slots together. It never changes."""

    def shares(self, slot: int, length: int) -> bool:
        """Whether the first `length` tokens of a slot, of those it was given, can begin another."""

    def open(self, slot: int, source: int, length: int, reach: int) -> None:
        """A new text of up to `reach` tokens in `slot`, beginning with the first `length` tokens of slot `source`."""

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Appends each row's ids to its slot; the logits after the last of them, (rows, V) fp32 on the CPU."""

    def wipe(self, slot: int) -> None:
        """Overwrites what a slot holds, which may be NaN."""


class ReferenceRunner:
    """The definition of a `Runner`."""

    def __init__(self, model: Transformer, slots: int, max_seq_len: int, longest_row: int) -> None:
        """Memory for `slots` texts of up to `max_seq_len` tokens is taken here, all of it."""
        weight = model.token_embedding.weight
        self._model = model
        self._cache = KVCache(model.config, slots, max_seq_len, weight.dtype, weight.device)
        self._cache.allocate(longest_row)
        self._rows = [self._cache.row(slot) for slot in range(slots)]
        # The rotation follows the length a text will reach: beginnings and batches are not alike.
        self._follows_reach = model.config.rope_scaling == "dynamic"

    @staticmethod
    def slot_bytes(model: Transformer, max_seq_len: int, longest_row: int) -> int:
        """Bytes of keys and values a slot will take."""
        config = model.config
        values = 2 * config.n_layers * config.n_kv_heads * config.head_dim
        return row_capacity(config, max_seq_len, longest_row) * values * model.token_embedding.weight.element_size()

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def shares(self, slot: int, length: int) -> bool:
        return not self._follows_reach and self._rows[slot].can_truncate(length)

    def open(self, slot: int, source: int, length: int, reach: int) -> None:
        self._cache.copy_prefix(source, slot, length)
        if self._follows_reach:
            self._rows[slot] = self._cache.row(slot, reach)

    @torch.no_grad()
    def run(self, rows: Sequence[Row]) -> Tensor:
        single = [] if self._follows_reach else [n for n, row in enumerate(rows) if len(row.ids) == 1]
        device = self._cache.lengths.device
        hidden: list[Tensor] = [torch.empty(0)] * len(rows)
        for number, row in enumerate(rows):
            if number not in single:
                ids = torch.tensor([row.ids], device=device)
                hidden[number] = self._model.hidden(ids, cache=self._rows[row.slot]).hidden[0, -1]
        if single:
            ids = torch.zeros(self._cache.batch_size, 1, dtype=torch.int64)
            positions = torch.full_like(ids, -1)
            for number in single:
                ids[rows[number].slot], positions[rows[number].slot] = rows[number].ids[0], rows[number].start
            together = self._step(ids.to(device), positions.to(device))
            for number in single:
                hidden[number] = together[rows[number].slot]
        return self._logits(torch.stack(hidden)).float().cpu()

    def _step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One id for every slot that has position 0 or more, each (B, 1) -> (B, D)."""
        return self._model.hidden(ids, positions, cache=self._cache).hidden[:, 0]

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.lm_head(hidden)

    def wipe(self, slot: int) -> None:
        self._cache.row(slot).wipe()
