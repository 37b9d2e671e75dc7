"""The KV cache: what attention remembers of the tokens it has seen.

A cache is an object of its own, made by the caller and handed to the model, never hidden on it and never shared between
two calls unless the caller does so. The slot of a token *is* its position in its row:

    row 0   [k0 k1 k2 k3 k4 .  .  . ]   lengths[0] = 5
    row 1   [k0 k1 .  .  .  .  .  . ]   lengths[1] = 2; its padding was never stored

so rows of different lengths need no bookkeeping, and the causal rule `slot <= position` also hides whatever lies beyond
a row's end. Storage grows by doubling up to `max_seq_len`; one token more is refused.
"""

import torch
from torch import Tensor

from clockhand.config import ModelConfig, require
from clockhand.errors import ClockhandError

_FIRST_CAPACITY = 64


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
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)  # (B,)
        shape = (batch_size, 0, config.n_kv_heads, config.head_dim)
        # One tensor a layer: (B, capacity, K, Dh).
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.n_layers)]
        self._positions = torch.empty(batch_size, 0, dtype=torch.int64, device=device)  # of the call under way

    @property
    def capacity(self) -> int:
        """Slots allocated a row, at most max_seq_len."""
        return self._keys[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._keys + self._values)

    def next_positions(self, new_tokens: int) -> Tensor:
        """Where `new_tokens` more tokens of each row go: (B, T), continuing each row from its own length."""
        steps = torch.arange(new_tokens, device=self.lengths.device)
        return self.lengths[:, None] + steps

    def begin(self, positions: Tensor) -> Tensor:
        """Opens a call that will write at `positions` (B, T), -1 for padding; returns the key positions to see, (B, S).

        Raises `ClockhandError` when a position skips or repeats, or a row would outgrow max_seq_len; the cache is then
        as it was.
        """
        new = (positions >= 0).sum(-1)  # (B,)
        row = int((self.lengths + new).argmax())
        held = int(self.lengths[row])
        longest = held + int(new[row])
        if longest > self.max_seq_len:
            raise ClockhandError(
                f"the cache holds at most max_seq_len = {self.max_seq_len} tokens a row: "
                f"{held} held and {longest - held} more make {longest}"
            )
        expected = self.lengths[:, None] + (positions >= 0).cumsum(-1) - 1  # (B, T)
        if not bool(((positions == expected) | (positions < 0)).all()):
            raise ClockhandError("positions must continue each row of the cache without a gap or a repeat")
        self._reserve(longest)
        self._positions = positions
        self.lengths = self.lengths + new
        return torch.arange(longest, device=positions.device).expand(self.batch_size, longest)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v (B, T, K, Dh) of the open call; returns all that `layer` remembers, each (B, S, K, Dh)."""
        stored = self._positions >= 0
        rows = torch.arange(self.batch_size, device=k.device)[:, None].expand_as(stored)[stored]
        slots = self._positions[stored]
        self._keys[layer][rows, slots] = k[stored].to(self._keys[layer].dtype)
        self._values[layer][rows, slots] = v[stored].to(self._values[layer].dtype)
        longest = int(self.lengths.max())
        return self._keys[layer][:, :longest].to(k.dtype), self._values[layer][:, :longest].to(v.dtype)

    def truncate(self, length: int) -> None:
        """Forgets every token at position `length` and beyond."""
        if length < 0:
            raise ClockhandError(f"length = {length} must be 0 or more")
        self.lengths = self.lengths.clamp(max=length)

    @torch.inference_mode(False)  # see _reserve
    def copy(self) -> "KVCache":
        """A cache with the same content and nothing shared: two calls may continue one prefix."""
        twin = KVCache(
            self.config, self.batch_size, self.max_seq_len, dtype=self._keys[0].dtype, device=self.lengths.device
        )
        twin.lengths = self.lengths.clone()
        twin._keys = [tensor.clone() for tensor in self._keys]
        twin._values = [tensor.clone() for tensor in self._values]
        return twin

    @torch.inference_mode(False)  # or a cache first filled in that mode could not be written to outside it
    def _reserve(self, needed: int) -> None:
        if needed <= self.capacity:
            return
        capacity = min(max(needed, 2 * self.capacity, _FIRST_CAPACITY), self.max_seq_len)
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                # Zeros, not garbage: a masked key is multiplied by weight 0, and 0 · NaN is NaN.
                grown = old.new_zeros(old.shape[0], capacity, *old.shape[2:])
                grown[:, : old.shape[1]] = old
                tensors[layer] = grown
