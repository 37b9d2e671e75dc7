"""What the engine computes with: rows of ids go in, the logits after each row's last id come out.

`Runner` is all that the engine asks for. `ReferenceRunner` is the plain one, a `Transformer` and a `KVCache` of one row
a slot: rows of one id run as one batch, in which idle slots are padding, and every longer row runs alone, so that
nobody is padded to its width. `kernels/` has a faster one.
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
        self._model = model
        self._cache = KVCache(model.config, slots, max_seq_len, model.dtype, model.device)
        self._cache.allocate(longest_row)
        self._rows = [self._cache.row(slot) for slot in range(slots)]
        # The rotation follows the length a text will reach: beginnings and batches are not alike.
        self._follows_reach = model.config.rope_scaling == "dynamic"

    @staticmethod
    def slot_bytes(model: Transformer, max_seq_len: int, longest_row: int) -> int:
        """Bytes of keys and values a slot will take."""
        config = model.config
        values = 2 * config.n_layers * config.n_kv_heads * config.head_dim
        return row_capacity(config, max_seq_len, longest_row) * values * model.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def text(self, slot: int) -> KVCache:
        """The cache of a slot."""
        return self._rows[slot]

    def shares(self, slot: int, length: int) -> bool:
        return not self._follows_reach and self._rows[slot].can_truncate(length)

    def open(self, slot: int, source: int, length: int, reach: int) -> None:
        self._cache.copy_prefix(source, slot, length)
        if self._follows_reach:
            self._rows[slot] = self._cache.row(slot, reach)

    @torch.no_grad()
    def run(self, rows: Sequence[Row]) -> Tensor:
        single = [] if self._follows_reach else [n for n, row in enumerate(rows) if len(row.ids) == 1]
        if len(single) == len(rows):
            return self._step(rows).float().cpu()
        several = [n for n in range(len(rows)) if n not in single]
        logits: list[Tensor] = []
        if several:
            logits.append(self._read([rows[n] for n in several]).float())
        if single:
            logits.append(self._step([rows[n] for n in single]).float())
        order = torch.tensor([*several, *single]).argsort()
        return torch.cat(logits).cpu()[order]

    def _read(self, rows: Sequence[Row]) -> Tensor:
        """The logits after rows of any lengths, (rows, V)."""
        device, last = self._cache.lengths.device, []
        for row in rows:
            ids = torch.tensor([row.ids], device=device)
            last.append(self._model.hidden(ids, cache=self._rows[row.slot]).hidden[0, -1])  # (D,)
        return self._model.lm_head(torch.stack(last))

    def _step(self, rows: Sequence[Row]) -> Tensor:
        """The logits after rows of one id each, (rows, V)."""
        device = self._cache.lengths.device
        slots = torch.tensor([row.slot for row in rows])
        ids = torch.zeros(self._cache.batch_size, 1, dtype=torch.int64)
        positions = torch.full_like(ids, -1)
        ids[slots, 0] = torch.tensor([row.ids[0] for row in rows])
        positions[slots, 0] = torch.tensor([row.start for row in rows])
        hidden = self._model.hidden(ids.to(device), positions.to(device), cache=self._cache).hidden  # (slots, 1, D)
        return self._model.lm_head(hidden[slots.to(device), 0])

    def wipe(self, slot: int) -> None:
        self._cache.row(slot).wipe()
