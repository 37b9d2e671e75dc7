"""Batches out of a corpus: what a step sees is a function of the seed and the step, and of nothing else.

The training tokens are one row. An epoch cuts it into windows of T tokens, beginning at an offset of its own so that
the cuts fall elsewhere each time, and takes them in an order of its own, each once:

    row       . . |-- T --|-- T --|-- T --|-- T --| . .
    windows       |   2   |   0   |   3   |   1   |

There is no reader with a place in the file, so resuming at a step needs no replay, and ranks or micro-batches take
their rows of a batch without changing anybody's samples.

A window reads one token more than T, because the target of a position is the token after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from clockhand.data.shards import Corpus, Split
from clockhand.errors import ClockhandError

IGNORE_INDEX = -100  # a target that is not to be learned


@dataclass(frozen=True)
class Batch:
    """Token windows as the model and the loss take them, all int64."""

    ids: Tensor
    """(B, T)"""
    targets: Tensor
    """(B, T): the token after each, or IGNORE_INDEX where that one belongs to another document."""
    documents: Tensor | None
    """(B, T): equal numbers belong to one document. None when no row crosses from one document into another."""


class TrainWindows:
    """Windows of the training split in an order that seed and step decide."""

    def __init__(self, corpus: Corpus, batch_size: int, seq_len: int, seed: int = 0) -> None:
        """Raises `ClockhandError` when the split is shorter than one window."""
        self.split = corpus.split("train")
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed
        if self.split.n_tokens < seq_len + 1:
            raise ClockhandError(
                f"corpus '{corpus.folder}' has {self.split.n_tokens:,} training tokens; one window needs"
                f" {seq_len + 1:,} (seq_len = {seq_len} and the target of its last token)"
            )
        # If several fit, at least a window's length is left over, so that the offsets move every cut everywhere.
        self.windows_per_epoch = max(1, (self.split.n_tokens - seq_len) // seq_len)
        self._n_offsets = self.split.n_tokens - self.windows_per_epoch * seq_len

    def batch(self, step: int, rows: slice = slice(None)) -> Batch:
        """The windows of `step` (counted from 0): all, or those `rows` of them."""
        samples = range(step * self.batch_size, (step + 1) * self.batch_size)[rows]
        return _read_windows(self.split, [self._start(sample) for sample in samples], self.seq_len)

    def _start(self, sample: int) -> int:
        """Where in the row the window of a sample starts; samples are counted through all epochs."""
        epoch, place = divmod(sample, self.windows_per_epoch)
        offset, order = _epoch(self.seed, epoch, self.windows_per_epoch, self._n_offsets)
        return offset + int(order[place]) * self.seq_len


class ValidationWindows:
    """Fixed windows spread evenly over the validation split; the same ones every time, for comparable numbers."""

    def __init__(self, corpus: Corpus, batch_size: int, seq_len: int, max_windows: int | None = None) -> None:
        """With no `max_windows` every token but the first is a target once."""
        self.split = corpus.split("val")
        self.batch_size, self.seq_len = batch_size, seq_len
        self.pad_id = corpus.tokenizer.pad_id or 0  # any id will do where nobody learns from it
        whole = -(-(self.split.n_tokens - 1) // seq_len)  # the last one may be shorter
        n_windows = min(whole, max_windows or whole)
        self.starts = [window * whole // n_windows * seq_len for window in range(n_windows)]

    def __len__(self) -> int:
        """Number of batches; the last may have fewer rows."""
        return -(-len(self.starts) // self.batch_size)

    def batch(self, number: int) -> Batch:
        starts = self.starts[number * self.batch_size : (number + 1) * self.batch_size]
        return _read_windows(self.split, starts, self.seq_len, self.pad_id)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(number) for number in range(len(self)))


@lru_cache(maxsize=8)
def _epoch(seed: int, epoch: int, n_windows: int, n_offsets: int) -> tuple[int, np.ndarray]:
    """An epoch's offset and its order of windows."""
    random = np.random.default_rng([seed % 2**64, epoch])
    return int(random.integers(n_offsets)), random.permutation(n_windows)


def _read_windows(split: Split, starts: list[int], seq_len: int, pad_id: int = 0) -> Batch:
    """One row for each start. A row that reaches the end of the split is filled with `pad_id`, which nobody learns."""
    tokens = np.full((len(starts), seq_len + 1), pad_id, np.int64)  # (B, T+1)
    for row, start in enumerate(starts):
        found = split.read(start, min(start + seq_len + 1, split.n_tokens))
        tokens[row, : len(found)] = found
    offsets = np.array(starts, np.int64)[:, None] + np.arange(seq_len + 1)  # (B, T+1)
    documents = split.document_of(offsets)  # offsets beyond the end are in a document of their own, after the last

    ids, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # (B, T)
    targets[documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
    targets[offsets[:, 1:] >= split.n_tokens] = IGNORE_INDEX
    crossing = bool((documents[:, 0] != documents[:, -2]).any())
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.from_numpy(documents[:, :-1].astype(np.int64)) if crossing else None,
    )
