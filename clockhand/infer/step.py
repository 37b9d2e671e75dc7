"""One token through the whole model as one compiled graph, in which every weight is read once.

What makes it fast:
  * a product with one vector is written as (W · x).sum(-1), which inductor turns into one plain loop over the weights:
    no call, no copy, whatever type they are stored in; torch's own reaches a third of the bandwidth
  * the step, from the embedding to the logits, is one graph and one parallel region. What later loops read many times
    is put into memory (`stored`), or inductor would compute it again for every row of a matrix
  * attention reads blocks of 64 places, each from its first number to its last: 16 places of a key's dimension side by
    side, then 16 dimensions of a value, so that no sum goes across the lanes of a vector; and only the blocks that hold
    something. Their number is the one size that stays open in the graph, so it is compiled once
  * the compiled graph lies in the user's cache folder, and the next process loads it in milliseconds (`graphs.py`)

Activations are fp32. Who holds the cache, and when a step is taken, is in `decode.py`.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.infer.block import IN_EVERY_GRAPH, Products, block, dense, embed, hidden_norm, stored
from clockhand.infer.graphs import Run, graph_file, is_kept, load_or_compile, sources
from clockhand.infer.weights import Weights, head_of
from clockhand.model.packed import GROUP, Matrix

PLACES = 64
"""Places in a block of the cache."""
LANES = 16
"""fp32 numbers in a vector."""
UNSEEN = -1e30
"""Added to the score of what must not be seen. Not -inf: in a block of nothing else, -inf - -inf would be no number."""


class Step(nn.Module):
    """One token through the whole model: what is compiled. Writes its key and value into the cache it is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        weights: Weights,
        keys: list[Tensor],  # for each layer (blocks, K, 64/16, Dh, 16)
        values: list[Tensor],  # for each layer (blocks, K, Dh/16, 64, 16)
        seen: Tensor,  # (blocks, 64) fp32: 0 at places that are seen, UNSEEN elsewhere
        id: Tensor,  # (1,)
        place: Tensor,  # (1,) in the cache
        turned: list[Tensor],  # cos and sin of the position, each (1, Dh/2); empty without RoPE
        learned: list[Tensor],  # the row of the learned position, (1, D); empty without
    ) -> Tensor:  # (V,) fp32
        config = self.config
        x = embed(weights, id, torch.float32)
        if learned:
            x = x + learned[0]
        x = stored(x)
        mixture = self.mixture(weights) if config.is_moe else None
        for layer in range(config.n_layers):
            memory = (keys[layer], values[layer])

            def attend(q: Tensor, k: Tensor, v: Tensor, memory: tuple[Tensor, Tensor] = memory) -> Tensor:
                remember(memory, k, v, place)
                return attend_one(q, memory, seen)

            rotated = (turned[0], turned[1]) if turned else None
            x = block(config, weights, layer, x, rotated, WithOne(), attend, mixture)
        return WithOne().product(hidden_norm(config, weights, x), head_of(weights))[0]

    def mixture(self, weights: Weights) -> Callable[[Tensor, int], Tensor]:
        """The k experts of one token, and nobody else's weights: the choice is an index into them."""
        config = self.config

        def mix(x: Tensor, layer: int) -> Tensor:
            logits = stored((weights["router"][layer] * x).sum(-1))  # (E,)
            probabilities = stored(torch.softmax(logits, dim=-1))
            left, chosen, shares = probabilities, [], []
            for _ in range(config.n_experts_per_token):  # torch.topk would be a call out of the graph
                best = left.argmax(-1)
                chosen.append(best)
                shares.append(probabilities[best])
                left = torch.where(torch.arange(config.n_experts) == best, -1.0, left)
            total = torch.stack(shares).sum() if config.renormalize_top_k else 1.0
            answer = torch.zeros_like(x)
            for best, share in zip(chosen, shares):
                answer = answer + dense(config, weights, layer, x, WithOne(), expert=best) * (share / total)
            return answer

        return mix


class WithOne(Products):
    """x (1, D), W (N, D) -> (1, N): a loop over the rows, each summed in fp32."""

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        data, scale = matrix.data, matrix.scale
        if data.dtype == torch.uint8:
            parts = x.view(-1, GROUP)  # (D/32, 32)
            groups = data.unflatten(-1, (-1, GROUP // 2))  # (N, D/32, 16)
            low, high = (groups & 15).float() - 8, (groups >> 4).float() - 8
            both = low * parts[:, : GROUP // 2] + high * parts[:, GROUP // 2 :]
            return (both * scale[..., None]).sum((-1, -2))[None]
        y = (data.float() * x).sum(-1)  # (N,)
        return (y * scale if data.dtype == torch.int8 else y)[None]


# ---- its cache ----


def cache_shapes(config: ModelConfig, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a layer's keys and values. A head that is no multiple of 16 wide fills its vectors less."""
    lanes = math.gcd(config.head_dim, LANES)
    keys = (blocks, config.n_kv_heads, PLACES // LANES, config.head_dim, LANES)
    return keys, (blocks, config.n_kv_heads, config.head_dim // lanes, PLACES, lanes)


def remember(memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, places: Tensor) -> None:
    """Writes k and v (T, K, Dh) at `places` (T,)."""
    keys, values = memory
    lanes = values.shape[-1]
    block, place = places // PLACES, places % PLACES
    block, place = block[:, None, None], place[:, None, None]  # (T, 1, 1)
    head, dim = torch.arange(k.shape[1])[:, None], torch.arange(k.shape[2])  # (K, 1), (Dh,)
    keys.index_put_((block, head, place // LANES, dim, place % LANES), k.to(keys.dtype))
    values.index_put_((block, head, dim // lanes, place, dim % lanes), v.to(values.dtype))


def attend_one(q: Tensor, memory: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
    """q (1, H, Dh) over all blocks of the cache -> (1, H, Dh). The heads of a group share every number that is read.

    Every block has a softmax of its own, the threads share the blocks, and at the end each counts by how its largest
    score compares to the largest of all.
    """
    keys, values = memory
    q = q[0].unflatten(0, (keys.shape[1], -1))  # (K, G, Dh)
    group, scale = range(q.shape[1]), 1 / math.sqrt(q.shape[-1])
    # Bare sums: what else is done to them would be a loop of its own for each of the group.
    products = [(keys.float() * q[:, g, None, :, None]).sum(3) for g in group]  # each (blocks, K, 64/16, 16)
    score = stored(torch.stack(products, dim=2)).flatten(3) + seen[:, None, None]  # (blocks, K, G, 64)
    peak = score.amax(-1)  # (blocks, K, G)
    weight = torch.exp((score - peak[..., None]) * scale)
    total = weight.sum(-1)
    sums = [(weight[:, :, g, None, :, None] * values.float()).sum(3) for g in group]  # each (blocks, K, Dh/16, 16)
    mixed = stored(torch.stack(sums, dim=2)).flatten(3)  # (blocks, K, G, Dh)
    share = stored(torch.exp((peak - peak.amax(0)) * scale))
    attended = (mixed * share[..., None]).sum(0) / (total * share).sum(0)[..., None]  # (K, G, Dh)
    return stored(attended).flatten(0, 1)[None]


# ---- compiled, and kept ----


def is_compiled(config: ModelConfig, precision: str, cache_dtype: torch.dtype = torch.float32) -> bool:
    """Whether the step lies in the cache folder."""
    return is_kept(step_file(config, precision, cache_dtype))


def step_file(config: ModelConfig, precision: str, cache_dtype: torch.dtype) -> Path:
    """The file of the compiled step, named for all that ends up in it."""
    return graph_file("step", [_source(), repr(config), f"{precision} {cache_dtype}"])


@cache
def _source() -> str:
    return f"{PLACES} {LANES} {UNSEEN} {GROUP}" + sources(*IN_EVERY_GRAPH, WithOne, Step, remember, attend_one, _export)


PROMPT_SECONDS = 24
"""About how long the three graphs of a prompt take, for any number of layers (mini-llama on two idle cores, LOG.md)."""


def compile_seconds(config: ModelConfig) -> float:
    """About how long `compiled` takes the first time: 16 s for 4 layers and 30 s for 12 on two idle cores (LOG.md).

    What k experts of a layer add is a guess: k layers.
    """
    return 10 + 1.7 * config.n_layers * (1 if not config.is_moe else config.n_experts_per_token)


def is_worth_compiling(config: ModelConfig, weight_bytes: int, new_tokens: int, precision: str = "fp32") -> bool:
    """Whether so many tokens repay the compiling. `weight_bytes` are those in fp32.

    A line through what the step saves a token of three models (LOG.md): 13.6 ms of mini-llama's 17.9, where this says
    11.6, so that it pays from some 4,700 tokens on. Below fp32 the plain route unpacks every matrix for every token,
    which took 21 ms more for int8, 24 for bf16 and 39 for int4.
    """
    saved = weight_bytes / 22e9 + 0.42e-3 * config.n_layers
    if precision != "fp32":
        saved += weight_bytes / 6.7e9
    prompt = 0 if config.is_moe else PROMPT_SECONDS  # its graphs are made with the step
    return new_tokens * saved > compile_seconds(config) + prompt


def compiled(config: ModelConfig, precision: str, cache_dtype: torch.dtype, inputs: tuple[Any, ...]) -> Run:
    """The step as a function of its flat inputs, out of the cache folder, or compiled into it.

    `inputs` are an example. Raises `ClockhandError` where it has to be compiled and no C++ compiler is found.
    """
    return load_or_compile(step_file(config, precision, cache_dtype), lambda: _export(config, inputs))


def _export(config: ModelConfig, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    blocks = torch.export.Dim("blocks", min=2, max=1 << 20)
    weights, keys, values, _, _, _, turned, learned = inputs
    open_sizes = (
        dict.fromkeys(weights),
        [{0: blocks} for _ in keys],
        [{0: blocks} for _ in values],
        {0: blocks},
        None,
        None,
        [None for _ in turned],
        [None for _ in learned],
    )
    return torch.export.export(Step(config), inputs, dynamic_shapes=open_sizes)
