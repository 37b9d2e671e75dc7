"""The step of many streams: what `ReferenceRunner` computes, in one graph from ids to logits where rows have one id.

  * all live rows are one matrix, idle slots none of it: a step costs what is live
  * the arithmetic of a block is that of `block.py`; q, k and v come of one product, and every matrix lies in the
    order in which a product for some rows reads it (`ordered.py`)
  * rotation, mask and the places in the cache are settled once a step; a token goes to its place and no other is moved
  * attention reads keys and values as they lie in the cache, once for all heads of a group, and only as far as a row
    reaches (`attend_rows.py`)
  * compiled, all that lies between two products is one loop. The graph is compiled once for a shape of model, for any
    number of rows and any length, and kept on disk (`graphs.py`). Without it the same step runs as it is written

The prompts of a step, or what it reads of them, are one matrix too, and each attends by itself; that is never compiled.
Prefixes and memory are left to `ReferenceRunner`. The matrices are copies, made once.
"""

import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from clockhand.allocator import keep_freed_memory
from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.attend_rows import AttendRows, attend_in_torch, attend_rows, fastest_attend
from clockhand.infer.block import IN_EVERY_GRAPH, Products, block, embed, hidden_norm, stored
from clockhand.infer.graphs import Run, graph_file, is_kept, load_or_compile, sources
from clockhand.infer.native import CALLS
from clockhand.infer.ordered import OneDNN, Order, Panels, Unsorted, order_of
from clockhand.infer.runner import ReferenceRunner, Runner
from clockhand.infer.scheduler import Row
from clockhand.infer.step import compile_seconds
from clockhand.infer.weights import MATRICES, Weights, head_of, kept_for, stack_weights
from clockhand.model.attend import Visibility, attend
from clockhand.model.packed import Matrix, precision_of, unpack
from clockhand.model.rope import rotation
from clockhand.model.transformer import Transformer

ROWS = 32
"""So many rows the loops of a graph are laid out for."""
SCRATCH = 2**26
"""Bytes of freed memory that the process keeps: the logits of a step, and what drawing makes of them."""


def is_fusible(model: Transformer) -> bool:
    """Whether `FusedRunner` can run `model`: dense, on a CPU, in fp32 or bf16 or packed, without `dynamic` scaling."""
    config = model.config
    kinds = (torch.float32, torch.bfloat16)
    return (
        model.device.type == "cpu"
        and (precision_of(model) != "fp32" or model.dtype in kinds)
        and not config.is_moe
        and config.rope_scaling != "dynamic"
    )


def best_runner(
    model: Transformer, slots: int, max_seq_len: int, longest_row: int, compile: bool | None = None
) -> Runner:
    """The fast runner where it can run `model`, else the plain one. `compile` is that of `FusedRunner`.

    Raises `ClockhandError` for `compile` of a model that only the plain one can run.
    """
    if not is_fusible(model):
        if compile:
            raise ClockhandError(
                "compile = True needs a dense model on the CPU, in fp32, bf16 or packed, without dynamic RoPE scaling"
            )
        return ReferenceRunner(model, slots, max_seq_len, longest_row)
    return FusedRunner(model, slots, max_seq_len, longest_row, compile)


def is_step_compiled(model: Transformer) -> bool:
    """Whether the step for a model that is `is_fusible` lies in the cache folder."""
    return is_compiled(model.config, _precision(model), model.dtype)


def _precision(model: Transformer) -> str:
    return "bf16" if model.dtype == torch.bfloat16 else precision_of(model)


def is_worth_compiling(config: ModelConfig, steps: int) -> bool:
    """Whether so many steps repay compiling. With 4 rows and with 32 each took 0.4 to 0.55 ms a layer less for it, and
    compiling takes half as long again as for a single text (LOG.md)."""
    return steps * 0.45e-3 * config.n_layers > 1.5 * compile_seconds(config)


def copied_bytes(model: Transformer) -> int:
    """Bytes of the weights that a `FusedRunner` of `model` holds beside it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    learned = "position_embedding.weight"  # is only looked at
    total = sum(
        each.numel() * (4 if each.dim() == 1 and each.is_floating_point() else each.element_size())
        for name, each in tensors
        if name != learned
    )
    is_sorted = precision_of(model) == "fp32" and not isinstance(order_of(model.config, model.dtype), Unsorted)
    return total + (model.lm_head.weight.nbytes if model.config.tie_embeddings and is_sorted else 0)


# ---- the weights ----


def _in_order(weights: Weights, dtype: torch.dtype, order: Order) -> dict[str, Any]:
    """`weights`, but with the matrices that are multiplied as they lie, those in `dtype`, in `order`."""
    if weights["qkv"].dtype != dtype or isinstance(order, Unsorted):
        return {**weights}
    matrices = {name: weights[name] for name in MATRICES if name in weights}
    matrices["head"] = head_of(weights).data[None]  # the embedding itself is looked up, not multiplied
    return {**weights, "head.scale": torch.empty(0)} | {name: order.sort(each) for name, each in matrices.items()}


# ---- the step ----


class ManyStep(nn.Module):
    """One token of every row through the whole model: what is compiled. Writes their keys and values into the cache."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, products: Products, attend: AttendRows) -> None:
        super().__init__()
        self.config, self.dtype, self.products, self.attend = config, dtype, products, attend

    def forward(
        self,
        weights: Weights,
        keys: list[Tensor],  # for each layer (slots, capacity, K, Dh)
        values: list[Tensor],  # likewise
        seen: Tensor,  # (n, S) fp32: 0 at places that are seen, -inf elsewhere
        ids: Tensor,  # (n,)
        slots: Tensor,  # (n,) of the cache
        places: Tensor,  # (n,) in its slot
        turned: list[Tensor],  # cos and sin of the positions, each (n, Dh/2); empty without RoPE
        learned: list[Tensor],  # the rows of the learned positions, (n, D); empty without
    ) -> Tensor:  # (n, V) fp32
        config = self.config
        x = embed(weights, ids, self.dtype)
        if learned:
            x = x + learned[0]
        x = stored(x)
        for layer in range(config.n_layers):
            memory = (keys[layer], values[layer])

            def attend(q: Tensor, k: Tensor, v: Tensor, memory: tuple[Tensor, Tensor] = memory) -> Tensor:
                for each, new in zip(memory, (k, v)):
                    each.index_put_((slots, places), new.to(each.dtype))
                return self.attend(q, *memory, slots, seen)

            rotated = (turned[0], turned[1]) if turned else None
            x = block(config, weights, layer, x, rotated, self.products, attend, mixture=None)
        return self.products.product(hidden_norm(config, weights, x), head_of(weights)).float()


class WithRows(Products):
    """x (n, D), W (N, D) -> (n, N), in the type of x."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        if matrix.data.dtype == x.dtype:
            return self.order.product(x, matrix.data)
        return F.linear(x, unpack(matrix).to(x.dtype))


# ---- compiled, and kept ----


def is_compiled(config: ModelConfig, precision: str, dtype: torch.dtype) -> bool:
    """Whether the step lies in the cache folder."""
    return is_kept(_file(config, precision, dtype))


def _file(config: ModelConfig, precision: str, dtype: torch.dtype) -> Path:
    ways = f"{type(order_of(config, dtype)).__name__} {fastest_attend(dtype).__name__}"
    return graph_file("many", [_source(), repr(config), f"{precision} {dtype} {ways}"])


@cache
def _source() -> str:
    own = (_in_order, Unsorted, OneDNN, Panels, WithRows, ManyStep, attend_rows, attend_in_torch, _export)
    return sources(*IN_EVERY_GRAPH, *own)


def _export(step: ManyStep, example: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """`example` are inputs of a step, of the sizes that its loops are to be laid out for."""
    rows, places, slots, capacity = (
        torch.export.Dim(name, min=2, max=1 << 20) for name in ("rows", "places", "slots", "capacity")
    )
    weights, *_, turned, learned = example
    memory = [{0: slots, 1: capacity} for _ in range(step.config.n_layers)]
    row = {0: rows}
    sizes = (
        {name: [None] * len(each) if isinstance(each, list) else None for name, each in weights.items()},
        memory,
        memory,
        {0: rows, 1: places},
        row,
        row,
        row,
        [row for _ in turned],
        [row for _ in learned],
    )
    return torch.export.export(step, example, dynamic_shapes=sizes)


# ---- the runner ----


class FusedRunner(ReferenceRunner):
    """A `Runner` for models that are `is_fusible`."""

    @torch.no_grad()
    def __init__(
        self, model: Transformer, slots: int, max_seq_len: int, longest_row: int, compile: bool | None = None
    ) -> None:
        """`compile`: whether the step is compiled; None: only if that lies in the cache folder already.

        Raises `ClockhandError` for a model that is not `is_fusible`, and where the step has to be compiled and there is
        no C++ compiler.
        """
        if not is_fusible(model):
            raise ClockhandError(
                "a fused step needs dense layers, fp32, bf16 or packed weights on a CPU, and no dynamic RoPE"
            )
        super().__init__(model, slots, max_seq_len, longest_row)
        keep_freed_memory(SCRATCH)
        config = model.config
        self._dtype = model.dtype  # of activations; fp32 where the model is packed
        precision = _precision(model)
        order = order_of(config, self._dtype)
        self._products = WithRows(order)
        self._many = ManyStep(config, self._dtype, self._products, fastest_attend(self._dtype))
        self._weights = kept_for(
            model, f"in order, {precision}", lambda: _in_order(stack_weights(model, precision), self._dtype, order)
        )
        self._turned: list[Tensor] = []
        if config.position == "rope":
            self._turned = [each[0] for each in rotation(config, torch.arange(max_seq_len)[None])]  # (positions, Dh/2)
        table = model.position_embedding
        self._learned = [] if table is None else [table.weight.detach()]
        self._graph: Run | None = None
        if compile or (compile is None and is_compiled(config, precision, self._dtype)):
            export = partial(_export, self._many, self._example())
            try:
                self._graph = load_or_compile(_file(config, precision, self._dtype), export, CALLS)
            except ClockhandError as error:  # it was there, but damaged, and cannot be made again
                if compile:
                    raise
                print(f"note: {error}: many texts are continued by a step that is not compiled", file=sys.stderr)
        self._flat = tree_leaves((self._weights, *self._cache.memory))

    @torch.no_grad()
    def score(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Appends `ids`, two or more, to a slot as rows of one step; the logits after each of them, (T, V) fp32."""
        text = self._rows[slot]
        positions = text.next_positions(len(ids))  # (1, T)
        seen = Visibility(positions, text.begin(positions), self._model.config.sliding_window).mask[0]  # (T, S)
        places = positions[0] % text.capacity
        return self._run(torch.tensor(ids), torch.full_like(places, slot), positions[0], places, seen)

    def _step(self, rows: Sequence[Row]) -> Tensor:
        if len(rows) == 1:  # the graph is for two and more
            return self._step([*rows, *rows])[:1]
        ids, slots = torch.tensor([[row.ids[0] for row in rows], [row.slot for row in rows]])
        return self._run(ids, slots, *self._cache.append(slots))

    def _run(self, ids: Tensor, slots: Tensor, positions: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """A step of rows (n,) that see `seen` (n, S) bool of the places in their slots: (n, V) fp32."""
        now = [torch.where(seen, 0.0, -math.inf), ids, slots, places]
        turned = [each[positions] for each in self._turned]
        learned = [each[positions] for each in self._learned]
        if self._graph is not None:
            return self._graph([*self._flat, *now, *turned, *learned])[0]
        return self._many(self._weights, *self._cache.memory, *now, turned, learned)

    def _read(self, rows: Sequence[Row]) -> Tensor:
        config, weights, lengths = self._model.config, self._weights, [len(row.ids) for row in rows]
        caches = [self._rows[row.slot] for row in rows]
        positions = [cache.next_positions(length) for cache, length in zip(caches, lengths)]  # each (1, T)
        sees = [Visibility(own, cache.begin(own), config.sliding_window) for cache, own in zip(caches, positions)]
        where = torch.cat(positions, dim=1)[0]  # (sum of T,)
        x = embed(weights, torch.tensor([id for row in rows for id in row.ids]), self._dtype)
        if self._learned:
            x = x + self._learned[0][where]
        rotated = (self._turned[0][where], self._turned[1][where]) if self._turned else None
        for layer in range(config.n_layers):

            def attend_each(q: Tensor, k: Tensor, v: Tensor, layer: int = layer) -> Tensor:
                attended = []
                parts = (each[None].split(lengths, dim=1) for each in (q, k, v))
                for text, own, q, k, v in zip(caches, sees, *parts):
                    keys, values = text.update(layer, k, v)
                    attended.append(attend(q, keys, values, own)[0])
                return torch.cat(attended)

            x = block(config, weights, layer, x, rotated, self._products, attend_each, mixture=None)
        last = torch.tensor(lengths).cumsum(0) - 1
        # A single row is multiplied in another way, whose last bits differ.
        last = torch.cat((last, last)) if len(rows) == 1 else last
        return self._products.product(hidden_norm(config, weights, x[last]), head_of(weights)).float()[: len(rows)]

    def _example(self) -> tuple[Any, ...]:
        """Inputs of a step for `ROWS` streams of up to 64 tokens. Their values do not matter."""
        rows, places = ROWS, 64
        # Stand-ins for what lies in an order that only oneDNN knows: an export must be able to look at a tensor.
        weights = {
            name: [torch.empty(each.shape, dtype=each.dtype) for each in known] if isinstance(known, list) else known
            for name, known in self._weights.items()
        }
        keys, values = ([each.new_zeros(rows, places, *each.shape[2:]) for each in part] for part in self._cache.memory)
        ids, slots, where = torch.zeros(3, rows, dtype=torch.int64)
        turned = [each[:1].repeat(rows, 1) for each in self._turned]
        learned = [each[:1].repeat(rows, 1) for each in self._learned]
        return weights, keys, values, torch.zeros(rows, places), ids, slots, where, turned, learned
