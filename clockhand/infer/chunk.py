"""A chunk of a prompt through compiled graphs: what lies between two products is one loop.

Three graphs. Every layer runs them, with its own weights as inputs, for any number of tokens:

    before   x -> q, k, v               norm, product, rotation
    attend   q, k, v -> attended        of a block of queries: two products, and mask and softmax between them
    after    x, attended -> x           product, norm, MLP

They compute what `block.py` and `prompt.attend_many` say, which run as they are written where these graphs do not lie
in the cache folder, for experts, and for a single token. Matrices that are not packed are read in oneDNN's order, of
which a copy is made for the first long chunk.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.block import IN_EVERY_GRAPH, Products, after_attending, before_attending, stored
from clockhand.infer.graphs import graph_file, is_kept, load_or_compile, sources
from clockhand.infer.ordered import OneDNN
from clockhand.infer.prompt import QUERIES, WithMany, WithManyFused
from clockhand.infer.weights import MATRICES, Weights
from clockhand.model.packed import GROUP

LONG = 256
"""Tokens of a chunk from which on the order counts: made once, it is repaid by some five chunks (LOG.md)."""

Layer = dict[str, Any]
"""The weights of one layer by the names of `weights.py`, each matrix as a list of one: in an order of its own it has no
part that a graph could look at."""

# ---- what is compiled ----


class Before(nn.Module):
    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.config, self.products = config, products

    def forward(self, layer: Weights, x: Tensor, turned: list[Tensor]) -> tuple[Tensor, ...]:
        """x (T, D) -> q (T, H, Dh), k and v (K, T, Dh): of heads that lie by themselves bf16 scores come sooner."""
        rotated = (turned[0], turned[1]) if turned else None
        q, k, v = before_attending(self.config, layer, 0, x, rotated, self.products)
        return q.contiguous(), k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()


class AttendSome(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, attended: Tensor) -> Tensor:
        """q (t, H, Dh) over the first S places of k and v (K, P, Dh), written into `attended` (t, H, Dh).

        seen (t, S) fp32 is 0 where a key is seen, -inf elsewhere. It is an input: computed from positions it was three
        times the work, in integers of 64 bits.
        """
        tokens, kv_heads, dtype, scale = q.shape[0], k.shape[0], q.dtype, 1 / math.sqrt(q.shape[-1])
        k, v = (each.as_strided((kv_heads, seen.shape[1], q.shape[-1]), each.stride()) for each in (k, v))
        rows = q.unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # (K, t·G, Dh)
        scores = torch.bmm(rows, k.transpose(1, 2)).unflatten(1, (tokens, -1))  # (K, t, G, S)
        scores = scores.float() + seen[:, None]
        far = (scores - scores.amax(-1, keepdim=True)) * scale
        shares = stored(exponential(far, dtype).to(dtype))
        mixed = torch.bmm(shares.flatten(1, 2), v).unflatten(1, (tokens, -1))  # (K, t, G, Dh)
        mixed = mixed / shares.float().sum(-1, keepdim=True)
        return attended.copy_(mixed.to(dtype).transpose(0, 1).flatten(1, 2))


def exponential(x: Tensor, dtype: torch.dtype) -> Tensor:
    """e^x of x <= 0, in fp32 but only as near as `dtype` can tell: (e^(x/64))^64, four terms and six squarings.

    torch's exp is a call for every vector, and took a fifth of the time of attention.
    """
    if dtype == torch.float32:
        return torch.exp(x)
    x = (x / 64).clamp(min=-1.55)  # from there on 0 comes out, as it must of -inf
    y = 1 + x * (1 + x * (1 / 2 + x * (1 / 6)))
    for _ in range(6):
        y = y * y
    return y


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

    def __init__(
        self,
        config: ModelConfig,
        precision: str,
        dtype: torch.dtype,
        weights: Weights,
        in_order: Callable[[], Weights] | None = None,
    ) -> None:
        """Loads the graphs for activations in `dtype`, or compiles them.

        `in_order` gives what `ordered` makes of the weights, where it can be made. The first long chunk asks for it.

        Raises `ClockhandError` for experts, and as `load_or_compile` does.
        """
        if config.is_moe:
            raise ClockhandError(
                f"n_experts = {config.n_experts}: a prompt of experts cannot be read by compiled graphs"
            )
        layers = _layers(config, weights)
        self._config, self._flat, self._in_order = config, [tree_leaves(layer) for layer in layers], in_order
        self._before, self._attend, self._after = (
            load_or_compile(file, lambda name=name: _export(name, config, dtype, layers[0]))  # type: ignore[misc]
            for name, file in _files(config, precision, dtype).items()
        )

    def before(self, layer: int, x: Tensor, turned: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, D) -> q (T, H, Dh), k and v (T, K, Dh)."""
        if self._in_order is not None and len(x) >= LONG:
            self._flat = [tree_leaves(each) for each in _layers(self._config, self._in_order())]
            self._in_order = None
        q, k, v = self._before([*self._flat[layer], x, *turned])
        return q, k.transpose(0, 1), v.transpose(0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: list[Tensor]) -> Tensor:
        """What `attend_many` computes; `seen` is of `seen_by_block`."""
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()  # as they come from `before`
        attended, end = torch.empty_like(q), k.shape[1] - len(q)
        for some, mask, part in zip(q.tensor_split(len(seen)), seen, attended.tensor_split(len(seen))):
            end += len(some)
            begin = end - mask.shape[1]  # beyond 0 only under a window
            past = [each[:, begin:].contiguous() for each in (k, v)] if begin else [k, v]
            self._attend([some, *past, mask, part])
        return attended

    def after(self, layer: int, x: Tensor, attended: Tensor) -> Tensor:
        return self._after([*self._flat[layer], x, attended])[0]


def can_be_ordered(weights: Weights, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies activations in `dtype` by the matrices as they are."""
    return torch.backends.mkldnn.is_available() and weights["qkv"].dtype == dtype


def ordered(weights: Weights) -> Weights:
    """`weights` with every matrix of a layer in the order in which oneDNN reads it."""
    in_order: dict[str, Any] = {name: OneDNN().sort(weights[name]) for name in MATRICES if name in weights}
    return {**weights, **in_order}


def _layers(config: ModelConfig, weights: Weights) -> list[Layer]:
    outside = ("embedding", "head", "final_norm")
    inside = {name: each for name, each in weights.items() if not name.startswith(outside)}
    return [
        {name: [each[layer]] if name in MATRICES else each[layer : layer + 1] for name, each in inside.items()}
        for layer in range(config.n_layers)
    ]


def seen_by_block(tokens: int, length: int, window: int) -> list[Tensor]:
    """For each block of the last `tokens` of `length` positions, what it sees of those up to its end: (t, S) fp32."""
    masks = []
    for here in torch.arange(length - tokens, length).tensor_split(-(-tokens // QUERIES)):  # none of them of one alone
        first, end = int(here[0]), int(here[-1]) + 1
        behind = here[:, None] - torch.arange(max(0, first - window + 1) if window else 0, end)  # (t, S)
        unseen = (behind < 0) | (behind >= window) if window else behind < 0
        masks.append(torch.zeros(behind.shape).masked_fill_(unseen, -math.inf))
    return masks


# ---- compiled, and kept ----


def is_chunk_compiled(config: ModelConfig, precision: str, dtype: torch.dtype) -> bool:
    return all(map(is_kept, _files(config, precision, dtype).values()))


def _files(config: ModelConfig, precision: str, dtype: torch.dtype) -> dict[str, Path]:
    parts = [_source(), repr(config), f"{precision} {dtype} {torch.backends.mkldnn.is_available()}"]
    return {name: graph_file(name, parts) for name in ("before", "attend", "after")}


@cache
def _source() -> str:
    ours = (WithMany, WithManyFused, Before, AttendSome, exponential, After, _layers, _export)
    return f"{GROUP}" + sources(*IN_EVERY_GRAPH, *ours)


def _export(name: str, config: ModelConfig, dtype: torch.dtype, layer: Layer) -> torch.export.ExportedProgram:
    tokens, places, held = (torch.export.Dim(size, min=2, max=1 << 20) for size in ("tokens", "places", "held"))
    row: dict[int, Any] = {0: tokens}

    def example(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    heads = (config.n_heads, config.head_dim)
    products: Products = WithMany()
    if torch.backends.mkldnn.is_available():
        products = WithManyFused()
        _describe_binary()
    weights: dict[str, Any] = {name: [None] if name in MATRICES else None for name in layer}
    x = example(512, config.d_model)
    module: nn.Module
    inputs: tuple[Any, ...]
    sizes: tuple[Any, ...]
    if name == "attend":
        key, value = (example(config.n_kv_heads, 5 * QUERIES, config.head_dim) for _ in range(2))
        seen = example(QUERIES, 4 * QUERIES, dtype=torch.float32)
        module, inputs = AttendSome(), (example(QUERIES, *heads), key, value, seen, example(QUERIES, *heads))
        sizes = (row, {1: held}, {1: held}, {0: tokens, 1: places}, row)
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
