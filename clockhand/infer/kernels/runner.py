"""The step as the engine asks for it: rows of ids go in, the logits after each row's last id come out.

    row of one id       a text that goes on          all rows of a call are one step: whoever reads
    row of several      a prompt, or a draft         a prompt does not make the others wait for another

The cache is the model's own, `model/cache.py`; the step writes into it and reads from it where it lies.
"""

import ctypes
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.kernels.library import Call, library
from clockhand.infer.kernels.weights import PackedModel, packed_for
from clockhand.infer.scheduler import Row
from clockhand.model.cache import KVCache, row_capacity
from clockhand.model.rope import rotation
from clockhand.model.transformer import Transformer


class StepRunner:
    """A `Runner` by the step in C++. Not for two threads at once."""

    def __init__(self, model: PackedModel, slots: int, max_seq_len: int, longest_row: int) -> None:
        """Takes memory for `slots` texts of up to `max_seq_len` tokens, and for rows of up to `longest_row` ids."""
        self._model, self._config = model, model.config
        self._cache = KVCache(model.config, slots, max_seq_len, _cache_dtype(model.precision))
        self._cache.allocate(longest_row)
        self._rows = [self._cache.row(slot) for slot in range(slots)]
        self._longest_row = longest_row
        self._lengths: list[int] = [0] * slots
        self._follows_reach = model.config.rope_scaling == "dynamic"
        self._cos_sin: list[tuple[np.ndarray, np.ndarray] | None] = [None] * slots
        if model.config.position == "rope" and not self._follows_reach:
            self._cos_sin = [self._table(max_seq_len)] * slots
        keys, values = self._cache.memory
        self._keys, self._values = (
            (ctypes.c_void_p * len(part))(*[each.data_ptr() for each in part]) for part in (keys, values)
        )
        functions = model.library.functions
        self._workspace = functions.make_workspace()
        if not self._workspace:
            raise MemoryError
        weakref.finalize(self, functions.free_workspace, self._workspace)

    @staticmethod
    def slot_bytes(config: ModelConfig, precision: str, max_seq_len: int, longest_row: int) -> int:
        """Bytes of keys and values a slot will take."""
        values = 2 * config.n_layers * config.n_kv_heads * config.head_dim
        return row_capacity(config, max_seq_len, longest_row) * values * _cache_dtype(precision).itemsize

    @property
    def nbytes(self) -> int:
        return self._cache.nbytes

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return self._lengths[slot]

    def shares(self, slot: int, length: int) -> bool:
        return not self._follows_reach and self.can_truncate(slot, length)

    def can_truncate(self, slot: int, length: int) -> bool:
        """Whether a slot can be cut back to its first `length` tokens."""
        return self._rows[slot].can_truncate(length)

    def truncate(self, slot: int, length: int) -> None:
        """Forgets what a slot holds from position `length` on."""
        self._rows[slot].truncate(length)
        self._lengths[slot] = min(length, self._lengths[slot])

    def open(self, slot: int, source: int, length: int, reach: int) -> None:
        self._cache.copy_prefix(source, slot, length)
        self._lengths[slot] = length
        if self._follows_reach:
            self._rows[slot] = self._cache.row(slot, reach)
            self._cos_sin[slot] = self._table(reach)

    def wipe(self, slot: int) -> None:
        self._cache.row(slot).wipe()
        self._lengths[slot] = 0

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Appends each row's ids to its slot; the logits after the last of them, (rows, V) fp32."""
        ends = np.cumsum([len(row.ids) for row in rows]) - 1
        return self._step(rows, ends)

    def append(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Appends `ids` to a slot; the logits after the last of them, (V,) fp32."""
        return self.run([Row(slot, list(ids), self._lengths[slot])])[0]

    def score(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Appends `ids` to a slot; the logits after each of them, (T, V) fp32."""
        return self._step([Row(slot, list(ids), self._lengths[slot])], np.arange(len(ids)))

    def _step(self, rows: Sequence[Row], wanted: np.ndarray) -> Tensor:
        counts = [len(row.ids) for row in rows]
        longest = max(row.start + count for row, count in zip(rows, counts))
        if max(counts) > self._longest_row or longest > self._cache.max_seq_len:
            raise ClockhandError(
                f"a step of {max(counts)} ids up to position {longest} must have at most {self._longest_row} ids and "
                f"max_seq_len = {self._cache.max_seq_len}"
            )
        total = sum(counts)
        ids = np.fromiter(chain.from_iterable(row.ids for row in rows), np.int32, total)
        if total == len(rows):
            slots = np.array([row.slot for row in rows], np.int32)
            positions = np.array([row.start for row in rows], np.int32)
        else:
            slots = np.repeat(np.array([row.slot for row in rows], np.int32), counts)
            positions = np.concatenate([np.arange(r.start, r.start + n, dtype=np.int32) for r, n in zip(rows, counts)])
        cos = sin = None
        if self._cos_sin[rows[0].slot] is not None:
            cos, sin = self._rotations(rows, positions, counts)
        wanted = wanted.astype(np.int32)
        logits = torch.empty(len(wanted), self._config.vocab_size)
        call = Call(
            rows=total,
            ids=ids.ctypes.data,
            slots=slots.ctypes.data,
            positions=positions.ctypes.data,
            cos=None if cos is None else cos.ctypes.data,
            sin=None if sin is None else sin.ctypes.data,
            keys=ctypes.addressof(self._keys),
            values=ctypes.addressof(self._values),
            capacity=self._cache.capacity,
            cache_bf16=self._model.precision == "bf16",
            wanted=len(wanted),
            wanted_rows=wanted.ctypes.data,
            logits=logits.data_ptr(),
        )
        model = ctypes.byref(self._model.structure)
        if self._model.library.functions.step(model, ctypes.byref(call), self._workspace, torch.get_num_threads()):
            raise MemoryError(f"no memory for a step of {total} rows")
        for row, count in zip(rows, counts):
            self._rows[row.slot].advance(count)
            self._lengths[row.slot] = row.start + count
        return logits

    def _rotations(
        self, rows: Sequence[Row], positions: np.ndarray, counts: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of the positions, each (rows, Dh/2)."""
        if not self._follows_reach:
            found: Any = self._cos_sin[0]
            return found[0][positions], found[1][positions]
        parts: list[Any] = [self._cos_sin[row.slot] for row in rows]
        places = np.split(positions, np.cumsum(counts)[:-1])
        cos, sin = (np.concatenate([part[i][at] for part, at in zip(parts, places)]) for i in range(2))
        return cos, sin

    def _table(self, reach: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of all positions of a text of up to `reach` tokens, each (reach, Dh/2)."""
        lengths = torch.full((1, 1), reach) if self._follows_reach else None
        cos, sin = rotation(self._config, torch.arange(reach)[None], lengths)
        return cos[0].contiguous().numpy(), sin[0].contiguous().numpy()


def _cache_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def step_runner(model: Transformer, slots: int, max_seq_len: int, longest_row: int) -> StepRunner:
    """A `StepRunner` of `model`, whose packed copy all runners of it share.

    Raises `ClockhandError` where there is no library for this processor, or the model is not on a CPU.
    """
    if model.device.type != "cpu":
        raise ClockhandError(f"the step in C++ is for a CPU, and the model is on {model.device.type}")
    return StepRunner(packed_for(model, library()), slots, max_seq_len, min(longest_row, max_seq_len))
