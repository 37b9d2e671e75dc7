"""The KV cache: what attention remembers of the tokens it has seen.

A cache is an object of its own, made by the caller and handed to the model, never hidden on it and never shared between
two calls unless the caller does so. The place of a token *is* its position in its row:

    row 0   [k0 k1 k2 k3 k4 .  .  . ]   lengths[0] = 5
    row 1   [k0 k1 .  .  .  .  .  . ]   lengths[1] = 2; its padding was never stored

so rows of different lengths need no bookkeeping, and the causal rule `place <= position` also hides whatever lies
beyond a row's end. Storage grows by doubling up to `max_seq_len`; one token more is refused.

Of a model with a sliding window W nothing older than W is ever looked at again. There the places are a ring: place =
position modulo the ring's size, and a row of any length costs W - 1 + (the most tokens of one call):

    ring    [k8 k9 k2 k3 k4 k5 k6 k7]   lengths[0] = 10; k0 and k1 are forgotten

Calls of few tokens keep `SLACK` tokens beyond the window all the same, by which a row can be cut back again.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from clockhand.config import ModelConfig, require
from clockhand.errors import ClockhandError

SLACK = 64
"""Tokens a ring keeps beyond its window at least: how far a row with a sliding window can always be cut back."""

STRIDE = 16
"""`append` looks over a multiple of so many places: whole vectors."""

_FIRST_CAPACITY = 64


def row_capacity(config: ModelConfig, max_seq_len: int, call: int) -> int:
    """The most places a row of up to `max_seq_len` tokens takes when no call brings more than `call` of them."""
    if not config.sliding_window:
        return max_seq_len
    return min(max_seq_len, config.sliding_window - 1 + max(call, SLACK))


@dataclass
class _Store:
    """The content, shared by a cache and the views of its rows."""

    keys: list[Tensor]  # one a layer: (B, capacity, K, Dh)
    values: list[Tensor]
    lengths: Tensor  # (B,) tokens that each row has taken in
    first: Tensor  # (B,) the earliest position that each row still holds


class KVCache:
    """Keys and values of `batch_size` rows for every layer. Filled by `model(ids, cache=cache)`, without gradients."""

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_seq_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """`max_seq_len` (default: the model's) is the most tokens a row may hold.

        Under `dynamic` RoPE scaling it is also the length the frequencies adapt to, so that any split of the same ids
        over several calls is rotated alike; give the length you will reach.
        """
        self.config = config
        self.batch_size = batch_size
        self.max_seq_len = config.max_seq_len if max_seq_len is None else max_seq_len
        for name in ("batch_size", "max_seq_len"):
            require(self, name, getattr(self, name) >= 1, "at least 1 in a cache")
        if config.position == "learned" and self.max_seq_len > config.max_seq_len:
            raise ClockhandError(
                f"a cache of max_seq_len = {self.max_seq_len} must not exceed the model's {config.max_seq_len}, "
                "because its positions are a learned table of that many rows"
            )
        shape = (batch_size, 0, config.n_kv_heads, config.head_dim)
        self._store = _Store(
            keys=[torch.empty(shape, dtype=dtype, device=device) for _ in range(config.n_layers)],
            values=[torch.empty(shape, dtype=dtype, device=device) for _ in range(config.n_layers)],
            lengths=torch.zeros(batch_size, dtype=torch.int64, device=device),
            first=torch.zeros(batch_size, dtype=torch.int64, device=device),
        )
        self._rows = slice(0, batch_size)  # of the store: all of them, or one in a view
        nowhere = torch.empty(0, dtype=torch.int64, device=device)
        self._where = nowhere, nowhere, nowhere  # row, column and place of each token of the call under way
        self._reach = 0  # S of the call under way

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row has taken in, (B,)."""
        return self._store.lengths[self._rows]

    @property
    def capacity(self) -> int:
        """Places allocated a row, at most max_seq_len."""
        return self._store.keys[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, for all rows, also where this is a view of one."""
        return sum(tensor.nbytes for tensor in self._store.keys + self._store.values)

    def row(self, row: int, max_seq_len: int | None = None) -> "KVCache":
        """One row as a cache of batch size 1 with the same memory: what is done to either is done to both.

        `max_seq_len` may set a limit of its own for what is done through this view.
        """
        if not 0 <= row < self.batch_size:
            raise ClockhandError(f"row = {row} must be between 0 and {self.batch_size - 1}")
        view = copy.copy(self)
        view.batch_size = 1
        view.max_seq_len = self.max_seq_len if max_seq_len is None else min(max_seq_len, self.max_seq_len)
        view._rows = slice(self._rows.start + row, self._rows.start + row + 1)
        return view

    def next_positions(self, new_tokens: int) -> Tensor:
        """Where `new_tokens` more tokens of each row go: (B, T), continuing each row from its own length."""
        steps = torch.arange(new_tokens, device=self.lengths.device)
        return self.lengths[:, None] + steps

    def begin(self, positions: Tensor) -> Tensor:
        """Opens a call that will write at `positions` (B, T), -1 for padding; returns the key positions to see, (B, S).

        A place that holds nothing to be seen has key position -1 or one that the causal rule hides. Raises
        `ClockhandError` when a position skips or repeats, or a row would outgrow max_seq_len; the cache is then as it
        was.
        """
        lengths, first = self.lengths, self._store.first[self._rows]  # views: written to below
        new = (positions >= 0).sum(-1)  # (B,)
        row = int((lengths + new).argmax())
        held = int(lengths[row])
        longest = held + int(new[row])
        if longest > self.max_seq_len:
            raise ClockhandError(
                f"the cache holds at most max_seq_len = {self.max_seq_len} tokens a row: "
                f"{held} held and {longest - held} more make {longest}"
            )
        expected = lengths[:, None] + (positions >= 0).cumsum(-1) - 1  # (B, T)
        if not bool(((positions == expected) | (positions < 0)).all()):
            raise ClockhandError("positions must continue each row of the cache without a gap or a repeat")
        limit = row_capacity(self.config, self.max_seq_len, int(new.max()))
        self._reserve(min(longest, limit), limit)
        rows, columns = (positions >= 0).nonzero(as_tuple=True)
        self._where = rows, columns, positions[rows, columns] % self.capacity
        lengths += new
        if self.config.sliding_window:
            torch.maximum(first, lengths - self.capacity, out=first)
            if bool(first.any()):
                self._reach = self.capacity
                return self._held_positions()
        self._reach = longest
        return torch.arange(longest, device=positions.device).expand(self.batch_size, longest)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v (B, T, K, Dh) of the open call; returns all that `layer` remembers, each (B, S, K, Dh)."""
        keys, values = self._store.keys[layer][self._rows], self._store.values[layer][self._rows]
        rows, columns, places = self._where
        keys[rows, places] = k[rows, columns].to(keys.dtype)
        values[rows, places] = v[rows, columns].to(values.dtype)
        return keys[:, : self._reach].to(k.dtype), values[:, : self._reach].to(v.dtype)

    @property
    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of all rows, for each layer (B, capacity, K, Dh), for those who `append`."""
        return self._store.keys, self._store.values

    def append(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more token for each of `rows` (n,), whose keys and values the caller writes into `memory` himself.

        Returns its position and its place there, both (n,), and which places it sees, (n, S) bool: itself too, and S
        reaches as far as the longest of these rows, rounded up to `STRIDE`. Raises `ClockhandError` when a row would
        outgrow max_seq_len; the cache is then as it was.
        """
        positions = self.lengths[rows]  # (n,)
        longest = int(positions.max()) + 1
        if longest > self.max_seq_len:
            raise ClockhandError(f"the cache holds at most max_seq_len = {self.max_seq_len} tokens a row, no more")
        limit, window = row_capacity(self.config, self.max_seq_len, 1), self.config.sliding_window
        self._reserve(min(longest, limit), limit)
        self.lengths[rows] = positions + 1
        reach = min(-(-longest // STRIDE) * STRIDE, self.capacity)
        places, own = torch.arange(reach, device=positions.device), positions[:, None]  # (S,), (n, 1)
        if not window:
            return positions, positions, places <= own
        first = self._store.first[self._rows]
        first[rows] = torch.maximum(first[rows], positions + 1 - self.capacity)
        held = own - (own - places) % self.capacity  # (n, S): the newest position that belongs in each place
        return positions, positions % self.capacity, (held >= 0) & (own - held < window)

    def advance(self, new_tokens: int) -> None:
        """Counts `new_tokens` more of every row, whose keys and values the caller has written into `memory`.

        Room for them must have been taken (`allocate`), since nothing is checked here.
        """
        lengths = self.lengths
        lengths += new_tokens
        if self.config.sliding_window:
            first = self._store.first[self._rows]
            torch.maximum(first, lengths - self.capacity, out=first)

    def can_truncate(self, length: int) -> bool:
        """Whether `truncate(length)` leaves each row what its next token will look back on."""
        cut = self.lengths > length
        oldest_seen = length - self.config.sliding_window + 1
        first = self._store.first[self._rows]
        return length == 0 or not bool((cut & (first > 0) & (first > oldest_seen)).any())

    def truncate(self, length: int) -> None:
        """Forgets every token at position `length` and beyond.

        Raises `ClockhandError` where a sliding window has let go of what the next token would look back on: further
        back than SLACK tokens.
        """
        if length < 0:
            raise ClockhandError(f"length = {length} must be 0 or more")
        if not self.can_truncate(length):
            window, first = self.config.sliding_window, int(self._store.first[self._rows].max())
            raise ClockhandError(
                f"length = {length} must be 0 or at least {first + window - 1}: "
                f"with sliding_window = {window} the positions before {first} are forgotten"
            )
        self.lengths.clamp_(max=length)
        if length == 0:
            self._store.first[self._rows] = 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Makes row `target` hold the first `length` tokens of row `source`, which stays as it is, and nothing else.

        Raises `ClockhandError` where the source has fewer, or its sliding window has forgotten what would be needed.
        """
        has, row = int(self.lengths[source]), self.row(source)
        if not 0 <= length <= has or not row.can_truncate(length):
            raise ClockhandError(f"length = {length} is more than row {source} of {has} tokens still holds from 0")
        if source == target:
            return self.row(target).truncate(length)
        places = slice(0, self.capacity if self.config.sliding_window else length)
        for tensor in self._store.keys + self._store.values:
            rows = tensor[self._rows]
            rows[target, places] = rows[source, places]
        self._store.first[self._rows][target] = self._store.first[self._rows][source] if length else 0
        self.lengths[target] = length

    def wipe(self) -> None:
        """Forgets all, and overwrites it: a masked NaN would still spread, since 0 · NaN is NaN."""
        self.truncate(0)
        for tensor in self._store.keys + self._store.values:
            tensor[self._rows] = 0

    def allocate(self, call: int) -> None:
        """Takes all the memory now that calls of up to `call` tokens can ever need, so that none is missing later."""
        limit = row_capacity(self.config, self.max_seq_len, call)
        self._reserve(limit, limit)

    @torch.inference_mode(False)  # see _reserve
    def copy(self) -> "KVCache":
        """A cache with the same content and nothing shared: two calls may continue one prefix."""
        keys, lengths = self._store.keys[0], self.lengths
        twin = KVCache(self.config, self.batch_size, self.max_seq_len, dtype=keys.dtype, device=lengths.device)
        twin._store = _Store(
            keys=[tensor[self._rows].clone() for tensor in self._store.keys],
            values=[tensor[self._rows].clone() for tensor in self._store.values],
            lengths=lengths.clone(),
            first=self._store.first[self._rows].clone(),
        )
        return twin

    def _held_positions(self) -> Tensor:
        """The position that each place holds, (B, capacity), -1 where none."""
        last = self.lengths[:, None] - 1  # (B, 1)
        places = torch.arange(self.capacity, device=last.device)
        positions = last - (last - places) % self.capacity  # the newest one that belongs in this place
        return positions.masked_fill(positions < self._store.first[self._rows, None], -1)

    @torch.inference_mode(False)  # or a cache first filled in that mode could not be written to outside it
    def _reserve(self, needed: int, limit: int) -> None:
        """Room for `needed` places a row; twice of what there was, as far as `limit` allows."""
        if needed <= self.capacity:
            return
        whole = copy.copy(self)  # growing moves every row, also when asked for by a view of one
        whole._rows = slice(0, len(self._store.lengths))
        held = whole._held_positions() if self.capacity else self._store.lengths.new_empty(len(self._store.lengths), 0)
        rows, old_places = (held >= 0).nonzero(as_tuple=True)
        capacity = min(max(needed, 2 * self.capacity, _FIRST_CAPACITY), limit)
        new_places = held[rows, old_places] % capacity
        for tensors in (self._store.keys, self._store.values):
            for layer, old in enumerate(tensors):
                # Zeros, not garbage: a masked key is multiplied by weight 0, and 0 · NaN is NaN. Written now, or each
                # page would be fetched by the token that first goes there.
                grown = old.new_empty(old.shape[0], capacity, *old.shape[2:]).zero_()
                grown[rows, new_places] = old[rows, old_places]
                tensors[layer] = grown
