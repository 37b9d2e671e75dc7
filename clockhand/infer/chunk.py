"""A chunk of a prompt through compiled graphs: what lies between two products is one loop.

Three graphs. Every layer runs them, with its own weights as inputs, for any number of tokens:

    before   x -> q, k, v               norm, product, rotation
    attend   q, k, v -> attended        of a block of queries: two products, and mask and softmax between them
    after    x, attended -> x           product, norm, MLP

They compute what `block.py` and `prompt.attend_many` say, which run as they are written where these graphs do not lie
in the cache folder, for experts, and for a single token.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.block import IN_EVERY_GRAPH, Products, after_attending, before_attending, stored
from clockhand.infer.graphs import graph_file, load_or_compile, sources
from clockhand.infer.prompt import QUERIES, WithMany, WithManyFused
from clockhand.infer.weights import Weights
from clockhand.model.packed import GROUP

# ---- what is compiled ----


class Before(nn.Module):
    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.config, self.products = config, products

    def forward(self, layer: Weights, x: Tensor, turned: list[Tensor]) -> tuple[Tensor, ...]:
        """x (T, D) -> q (T, H, Dh), k and v (T, K, Dh)."""
        rotated = (turned[0], turned[1]) if turned else None
        return tuple(each.contiguous() for each in before_attending(self.config, layer, 0, x, rotated, self.products))


class AttendSome(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """q (t, H, Dh) over k and v (S, K, Dh); seen (t, S) fp32 is 0 where a key is seen, -inf elsewhere: (t, H, Dh).

        The mask is an input: computed from positions it was three times the work, in integers of 64 bits.
        """
        tokens, kv_heads, dtype = q.shape[0], k.shape[1], q.dtype
        rows = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # (K, t·G, Dh)
        scores = torch.bmm(rows, k.permute(1, 2, 0)).unflatten(1, (tokens, -1))  # (K, t, G, S)
        scores = scores.float() + seen[:, None]
        far = (scores - scores.amax(-1, keepdim=True)) / math.sqrt(q.shape[-1])
        shares = stored(torch.exp(far).to(dtype))
        mixed = torch.bmm(shares.flatten(1, 2), v.transpose(0, 1)).unflatten(1, (tokens, -1))  # (K, t, G, Dh)
        mixed = mixed / shares.float().sum(-1, keepdim=True)
        return mixed.to(dtype).transpose(0, 1).flatten(1, 2).contiguous()


class After(nn.Module):
    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.config, self.products = config, products

    def forward(self, layer: Weights, x: Tensor, attended: Tensor) -> Tensor:
        """x (T, D), what came into the block, and attended (T, H, Dh) -> (T, D)."""
        return after_attending(self.config, layer, 0, x, attended, self.products, mixture=None)


# ---- the graphs ----


class ChunkGraphs:
    """The three graphs with the weights of a model: its blocks, for two tokens of a prompt or more."""

    def __init__(self, config: ModelConfig, precision: str, dtype: torch.dtype, weights: Weights) -> None:
        """Loads the graphs for activations in `dtype`, or compiles them.

        Raises `ClockhandError` for experts, and as `load_or_compile` does.
        """
        if config.is_moe:
            raise ClockhandError(
                f"n_experts = {config.n_experts}: a prompt of experts cannot be read by compiled graphs"
            )
        outside = ("embedding", "head", "final_norm")
        inside = {name: each for name, each in weights.items() if not name.startswith(outside)}
        layers = [{name: each[i : i + 1] for name, each in inside.items()} for i in range(config.n_layers)]
        self._layers = [list(layer.values()) for layer in layers]
        self._before, self._attend, self._after = (
            load_or_compile(file, lambda name=name: _export(name, config, dtype, layers[0]))  # type: ignore[misc]
            for name, file in _files(config, precision, dtype).items()
        )

    def before(self, layer: int, x: Tensor, turned: Sequence[Tensor]) -> list[Tensor]:
        return self._before([*self._layers[layer], x, *turned])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: list[Tensor]) -> Tensor:
        """What `attend_many` computes; `seen` is of `seen_by_block`."""
        k, v = k.contiguous(), v.contiguous()  # as the graph believes them to be; out of a cache they may lie otherwise
        parts, end = [], len(k) - len(q)
        for some, mask in zip(q.tensor_split(len(seen)), seen):
            end += len(some)
            past = slice(end - mask.shape[1], end)
            parts += self._attend([some, k[past], v[past], mask])
        return torch.cat(parts)

    def after(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        return self._after([*self._layers[layer], x, attended])[0]


def seen_by_block(tokens: int, places: int, window: int) -> list[Tensor]:
    """For each block of the last `tokens` of `places` positions, what it sees of those up to its end: (t, S) fp32."""
    masks = []
    for here in torch.arange(places - tokens, places).tensor_split(-(-tokens // QUERIES)):  # none of them of one alone
        first, end = int(here[0]), int(here[-1]) + 1
        behind = here[:, None] - torch.arange(max(0, first - window + 1) if window else 0, end)  # (t, S)
        unseen = (behind < 0) | (behind >= window) if window else behind < 0
        masks.append(torch.zeros(behind.shape).masked_fill_(unseen, -math.inf))
    return masks


# ---- compiled, and kept ----


def is_chunk_compiled(config: ModelConfig, precision: str, dtype: torch.dtype) -> bool:
    return all(file.is_file() for file in _files(config, precision, dtype).values())


def _files(config: ModelConfig, precision: str, dtype: torch.dtype) -> dict[str, Path]:
    parts = [_source(), repr(config), f"{precision} {dtype} {torch.backends.mkldnn.is_available()}"]
    return {name: graph_file(name, parts) for name in ("before", "attend", "after")}


@cache
def _source() -> str:
    return f"{GROUP}" + sources(*IN_EVERY_GRAPH, WithMany, WithManyFused, Before, AttendSome, After, _export)


def _export(name: str, config: ModelConfig, dtype: torch.dtype, layer: Weights) -> torch.export.ExportedProgram:
    tokens, places = (torch.export.Dim(size, min=2, max=1 << 20) for size in ("tokens", "places"))
    row: dict[int, Any] = {0: tokens}

    def example(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    heads = (config.n_heads, config.head_dim)
    products: Products = WithMany()
    if torch.backends.mkldnn.is_available():
        products = WithManyFused()
        _describe_binary()
    weights, x = dict.fromkeys(layer), example(512, config.d_model)
    module: nn.Module
    inputs: tuple[Any, ...]
    sizes: tuple[Any, ...]
    if name == "attend":
        key, value = (example(4 * QUERIES, config.n_kv_heads, config.head_dim) for _ in range(2))
        seen = example(QUERIES, 4 * QUERIES, dtype=torch.float32)
        module, inputs = AttendSome(), (example(QUERIES, *heads), key, value, seen)
        sizes = (row, {0: places}, {0: places}, {0: tokens, 1: places})
    elif name == "before":
        turned = [example(512, config.head_dim // 2, dtype=torch.float32) for _ in range(2)]
        turned = turned if config.position == "rope" else []
        module, inputs, sizes = Before(config, products), (layer, x, turned), (weights, row, [row for _ in turned])
    else:
        module, inputs, sizes = After(config, products), (layer, x, example(512, *heads)), (weights, row, row)
    return torch.export.export(module, inputs, dynamic_shapes=sizes)


@cache
def _describe_binary() -> None:
    """Tells the exporter the shape of a product that oneDNN finishes with a second tensor; torch has left that out."""

    @torch.library.register_fake("mkldnn::_linear_pointwise.binary")
    def _(x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
