"""One text on a GPU: the model's own blocks over a cache that never moves, recorded once and played back.

A GPU is done with the kernels of a token sooner than Python can ask for them one by one. So the
step's launches are recorded in a CUDA graph that every token plays back; nothing is compiled. What is recorded reads
and writes fixed addresses, hence

    keys, values      room for all tokens the text may ever have, zeros until they are written
    id, position      one number each, written before the step is played
    mask              the rule of `model/attend.py` as it stands: a place that is not written yet lies in the future

No arithmetic is written here. The same code runs on a CPU, where the tests compare it with the plain model and nothing
is recorded; a CPU's own fast way is `kernels/`. There was no GPU to write this on: recording and playing back have
never been run.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clockhand.errors import ClockhandError
from clockhand.infer.reach import check_ids, checked_reach
from clockhand.model.attend import Visibility
from clockhand.model.rope import rotation
from clockhand.model.transformer import Transformer

CHUNK = 512
"""Tokens of a prompt read at once."""


class StaticStep(nn.Module):
    """What `model(ids, cache=cache)` computes of one row, as one graph: no check, nothing that depends on a value."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        keys: list[Tensor],  # for each layer (1, S, K, Dh)
        values: list[Tensor],  # likewise
        turned: list[Tensor],  # cos and sin of all positions, each (S, Dh/2); empty without RoPE
        ids: Tensor,  # (1, T)
        positions: Tensor,  # (1, T)
        sees: Visibility,  # whose mask is settled: what settles it once for all layers is a lock, in no graph
    ) -> Tensor:  # (V,) fp32, after the last of `ids`
        model = self.model
        memory: Any = _StaticCache(keys, values, positions[0])
        x = model.token_embedding(ids)  # (1, T, D)
        if model.position_embedding is not None:
            x = x + model.position_embedding(positions)
        rotated = (turned[0][positions], turned[1][positions]) if turned else None  # each (1, T, Dh/2)
        for layer, block in enumerate(model.blocks):
            x, _ = block(x, rotated, sees, None, memory, layer)
        return model.lm_head(model.final_norm(x[:, -1]))[0].float()


class _StaticCache:
    """`KVCache.update` for places that are tensors, and hence not known while a graph is made."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], places: Tensor) -> None:
        self.keys, self.values, self.places = keys, values, places

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for memory, new in ((self.keys[layer], k), (self.values[layer], v)):
            memory.index_copy_(1, self.places, new.to(memory.dtype))
        return self.keys[layer].to(k.dtype), self.values[layer].to(v.dtype)


class StaticDecoder:
    """One text on its way through a model, which may be on a GPU. Not for two threads at once."""

    @torch.no_grad()
    def __init__(self, model: Transformer, reach: int | None = None) -> None:
        """`reach` (default: the model's max_seq_len) is the most tokens the text may have; memory for all is taken now.

        The model is put into evaluation mode. Raises `ClockhandError` for experts, whose choice of weights no graph can
        hold, and for a reach that the model cannot have.
        """
        config = model.config
        self.config, self.reach, self.length = config, checked_reach(config, reach), 0
        if config.is_moe:
            raise ClockhandError(f"n_experts = {config.n_experts}: a static step is for dense layers")
        places = max(self.reach, 2)  # torch has a graph of its own for 1
        shape = (1, places, config.n_kv_heads, config.head_dim)
        self._keys, self._values = (
            [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(config.n_layers)]
            for _ in range(2)
        )
        self._places = torch.arange(places, device=model.device)[None]  # (1, S)
        self._turned: list[Tensor] = []
        if config.position == "rope":
            lengths = torch.full((1, 1), self.reach) if config.rope_scaling == "dynamic" else None
            self._turned = [each[0] for each in rotation(config, self._places, lengths)]
        self._id, self._position = torch.zeros(2, 1, 1, dtype=torch.int64, device=model.device)
        self._plain = StaticStep(model).eval()
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids`; the logits after the last, (V,) fp32, on the CPU.

        Raises `ClockhandError` for an id beyond the vocabulary, for none at all, or for more than `reach` in all.
        """
        check_ids(self.config, ids, self.length, self.reach)
        logits = torch.empty(0)
        for chunk in torch.tensor([ids], dtype=torch.int64, device=self._id.device).split(CHUNK, dim=1):
            positions = torch.arange(self.length, self.length + chunk.shape[1], device=chunk.device)[None]
            logits = self._run(self._plain, chunk, positions)
            self.length += chunk.shape[1]
        return logits.cpu()

    @torch.no_grad()
    def step(self, id: int) -> Tensor:
        """Appends one id; the logits after it, (V,) fp32, on the CPU. Raises `ClockhandError` as `read` does."""
        check_ids(self.config, (id,), self.length, self.reach)
        self._id.fill_(id)
        self._position.fill_(self.length)
        if self._id.device.type != "cuda":
            self._logits = self._run(self._plain, self._id, self._position)
        else:
            if self._recorded is None:
                self._record()
            assert self._recorded is not None
            self._recorded.replay()
        self.length += 1
        return self._logits.cpu()

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids` by the better of the two ways; the logits after the last, (V,) fp32, on the CPU."""
        return self.step(ids[0]) if len(ids) == 1 and self.length else self.read(ids)

    def _run(self, step: Callable[..., Tensor], ids: Tensor, positions: Tensor) -> Tensor:
        sees = Visibility(positions, self._places, self.config.sliding_window)
        return step(self._keys, self._values, self._turned, ids, positions, sees)

    def _record(self) -> None:
        """Runs the step aside as torch wants it before a recording, and records it.

        Each run writes the same key and value into the same place, so that running it more often changes nothing.
        """
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                self._run(self._plain, self._id, self._position)
        torch.cuda.current_stream().wait_stream(beside)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            self._logits = self._run(self._plain, self._id, self._position)
        self._recorded = recorded
