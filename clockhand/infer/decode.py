"""One text at the speed of the memory: every weight is read once a token, by one compiled graph for the whole step.

    decoder = Decoder(model, "int8")
    logits = decoder.read(prompt)          the prompt, in chunks: matrix products
    logits = decoder.step(id)              one token: matrix-vector products, at the bandwidth of the memory

What makes it fast:
  * a product with one vector is written as (W · x).sum(-1), which inductor turns into one plain loop over the weights:
    no call, no copy, whatever type they are stored in; torch's own reaches a third of the bandwidth
  * the step, from the embedding to the logits, is one graph and one parallel region. What later loops read many times
    is put into memory (`stored`), or inductor would compute it again for every row of a matrix
  * attention reads blocks of 64 slots, each from its first number to its last: 16 slots of a key's dimension side by
    side, then 16 dimensions of a value, so that no sum goes across the lanes of a vector; and only the blocks that hold
    something. Their number is the one size that stays open in the graph, so it is compiled once
  * the compiled graph lies in the user's cache folder, and the next process loads it in milliseconds

The arithmetic of one block is written once, in `block`, for both ways; what differs is how a matrix is multiplied and
how the cache is looked at. Activations are fp32 in `step`. `model/transformer.py` is the definition both are tested
against. Many texts at once are the engine's work, how a token is drawn is in `sampling.py`.
"""

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.allocator import keep_freed_memory
from clockhand.config import ModelConfig
from clockhand.count import total_parameters
from clockhand.errors import ClockhandError
from clockhand.infer.graphs import Run, compiler, graph_file, load_or_compile, sources
from clockhand.model.attention import Attention
from clockhand.model.moe import MixtureOfExperts, route
from clockhand.model.packed import GROUP, Matrix, Packed, check_precision, pack, precision_of, unpack
from clockhand.model.rope import rotate, rotation
from clockhand.model.transformer import Transformer

SLOTS = 64
"""Slots in a block of the cache."""
LANES = 16
"""fp32 numbers in a vector."""
UNSEEN = -1e30
"""Added to the score of what must not be seen. Not -inf: in a block of nothing else, -inf - -inf would be no number."""
QUERIES = 128
"""Queries of a prompt that attend at once."""
SPARE = 64
"""Slots that the ring of a sliding window has beyond it: so many tokens can be taken back."""
SCRATCH = 2**26
"""Bytes of freed memory that the process keeps: what a chunk of a prompt needs, and soon needs again."""
CHUNK = 512
"""Tokens of a prompt read at once: enough for matrix products near their peak, and no more memory for longer ones."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (T, H, Dh), k and v (T, K, Dh) -> (T, H, Dh)


# ---- the weights ----

Weights = dict[str, Tensor]
"""All weights by name, each stacked over the layers: few tensors, since handing one to the graph costs time."""


def stack_weights(model: Transformer, precision: str) -> Weights:
    """The weights of `model`, matrices in `precision`: L first, q, k and v in one matrix."""
    config = model.config
    blocks: list[Any] = list(model.blocks)
    weights: Weights = {}

    def kept(module: Any) -> Matrix:
        return module.matrix if isinstance(module, Packed) else pack(module.weight, precision)

    def matrix(name: str, parts: list[Matrix]) -> None:
        stacked = _joined(parts, torch.stack)
        weights[name], weights[name + ".scale"] = stacked.data, stacked.scale

    def vector(name: str, parts: list[Tensor | None]) -> None:
        if all(part is not None for part in parts):
            weights[name] = torch.stack([part.detach().float() for part in parts if part is not None])

    def projections(attention: Attention) -> list[Any]:
        return [attention.q_proj, attention.k_proj, attention.v_proj]

    def beside(modules: list[Any]) -> Matrix:
        return _joined([kept(each) for each in modules], torch.cat)

    attentions: list[Attention] = [block.attention for block in blocks]

    matrix("embedding", [kept(model.token_embedding)])
    if not config.tie_embeddings:
        matrix("head", [kept(model.lm_head)])
    matrix("qkv", [beside(projections(each)) for each in attentions])
    matrix("o", [kept(each.o_proj) for each in attentions])
    if config.attention_bias != "none":
        vector("qkv.bias", [torch.cat([part.bias for part in projections(each)]) for each in attentions])
    vector("o.bias", [each.o_proj.bias for each in attentions])
    norms = {
        "attention_norm": [block.attention_norm for block in blocks],
        "mlp_norm": [block.mlp_norm for block in blocks],
        "q_norm": [each.q_norm for each in attentions],
        "k_norm": [each.k_norm for each in attentions],
        "final_norm": [model.final_norm],
    }
    modules: list[Any]
    for name, modules in norms.items():
        vector(name, [getattr(module, "weight", None) for module in modules])
        vector(name + ".bias", [getattr(module, "bias", None) for module in modules])

    # The MLPs of a layer, one or E: (L, F, D), or (L, E, F, D).
    for name in ("gate", "up", "down") if config.mlp == "swiglu" else ("up", "down"):
        matrices: list[Matrix] = []
        biases: list[Tensor | None] = []
        for block in blocks:
            mlps: list[Any] = list(block.mlp.experts) if isinstance(block.mlp, MixtureOfExperts) else [block.mlp]
            linears = [getattr(mlp, name + "_proj") for mlp in mlps]
            parts = [kept(linear) for linear in linears]
            matrices.append(_joined(parts, torch.stack) if config.is_moe else parts[0])
            if config.mlp_bias:
                bias = torch.stack([linear.bias for linear in linears])
                biases.append(bias if config.is_moe else bias[0])
        matrix(name, matrices)
        if config.mlp_bias:
            vector(name + ".bias", biases)
    if config.is_moe:  # where a token goes is a matter of small differences: not rounded
        weights["router"] = torch.stack([block.mlp.router.weight.detach().float() for block in blocks])
    return weights


def _joined(parts: list[Matrix], join: Callable[[list[Tensor]], Tensor]) -> Matrix:
    scales = [part.scale for part in parts]
    return Matrix(join([part.data for part in parts]), join(scales) if scales[0].numel() else scales[0])


def matrix_of(weights: Weights, name: str, layer: int = 0) -> Matrix:
    return rows_of(Matrix(weights[name], weights[name + ".scale"]), layer)


_kept: "weakref.WeakKeyDictionary[Transformer, dict[str, Weights]]" = weakref.WeakKeyDictionary()
_keeping = threading.Lock()


def keep_weights(model: Transformer) -> None:
    """A promise that the weights of `model` change no more: from now on all its decoders share one copy of them."""
    with _keeping:
        _kept.setdefault(model, {})


def _weights(model: Transformer, precision: str) -> Weights:
    with _keeping:
        kept = _kept.get(model)
        if kept is None:
            return stack_weights(model, precision)
        if precision not in kept:
            kept[precision] = stack_weights(model, precision)
        return kept[precision]


def _tensors(model: Transformer) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# ---- one block, for both ways ----


def block(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,  # (T, D)
    turned: tuple[Tensor, Tensor] | None,  # cos and sin, each (T, Dh/2)
    products: "Products",
    attend: Attend,
    mixture: Callable[[Tensor, int], Tensor],
    only_last: bool = False,
) -> Tensor:  # (T, D)
    """What `Block.forward` computes, without a balance loss; with `only_last`, for the last token alone, (1, D)."""
    pre = config.norm_position == "pre"
    heads, kv_heads = config.n_heads, config.n_kv_heads
    n = norm(config, weights, "attention_norm", layer, x) if pre else x
    qkv = products.plain(n, matrix_of(weights, "qkv", layer), bias_of(weights, "qkv", layer))
    qkv = stored(qkv).unflatten(-1, (-1, config.head_dim))  # (T, H + 2K, Dh)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if config.qk_norm:
        q, k = norm(config, weights, "q_norm", layer, q), norm(config, weights, "k_norm", layer, k)
    if turned is not None:
        both = torch.cat((q, k), dim=1) if config.qk_norm else qkv[:, : heads + kv_heads]  # (T, H + K, Dh)
        both = stored(rotate(both[None], turned[0][None], turned[1][None], config.rope_layout)[0])
        q, k = both.split([heads, kv_heads], dim=1)
    if only_last:
        q, x = q[-1:], x[-1:]
    attended = attend(q, k, v).flatten(1)  # (T, H·Dh)
    o, o_bias = matrix_of(weights, "o", layer), bias_of(weights, "o", layer)
    x = stored(products.added(attended, o, o_bias, x if config.residual else None))
    if not pre:
        x = norm(config, weights, "attention_norm", layer, x)

    n = norm(config, weights, "mlp_norm", layer, x) if pre else x
    before = x if config.residual else None
    if config.is_moe:
        update = mixture(n, layer)
        x = stored(update if before is None else before + update)
    else:
        x = stored(dense(config, weights, layer, n, products, before))
    return x if pre else norm(config, weights, "mlp_norm", layer, x)


def dense(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,
    products: "Products",
    before: Tensor | None = None,
    expert: Tensor | int | None = None,
) -> Tensor:
    """The MLP of a layer, or one expert of it, (T, D) -> (T, D), added to what was there `before`."""

    def part(name: str) -> tuple[Matrix, Tensor | None]:
        matrix, bias = matrix_of(weights, name, layer), bias_of(weights, name, layer)
        if expert is None:
            return matrix, bias
        return rows_of(matrix, expert), None if bias is None else bias[expert]

    if config.mlp == "swiglu":
        inner = products.gated(x, *part("gate"), *part("up"))
    else:
        inner = products.plain(x, *part("up"))
        inner = F.gelu(inner) if config.mlp == "gelu" else F.relu(inner)
    return products.added(stored(inner), *part("down"), before)


def norm(config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor) -> Tensor:
    weight, width = weights[name][layer], x.shape[-1]
    if config.norm == "rms":
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.norm_eps) * weight
    else:
        y = F.layer_norm(x.float(), (width,), weight, weights[name + ".bias"][layer], config.norm_eps)
    return stored(y.to(x.dtype))


class Products:
    """Products with a matrix, and what is done to them at once. Biases (N,) and what is added may be None."""

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:  # x (T, D), W (N, D) -> (T, N)
        raise NotImplementedError

    def plain(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        y = self.product(x, matrix)
        return y if bias is None else y + bias.to(y.dtype)

    def added(self, x: Tensor, matrix: Matrix, bias: Tensor | None, before: Tensor | None) -> Tensor:
        y = self.plain(x, matrix, bias)
        return y if before is None else before + y

    def gated(self, x: Tensor, gate: Matrix, gate_bias: Tensor | None, up: Matrix, up_bias: Tensor | None) -> Tensor:
        return F.silu(self.plain(x, gate, gate_bias)) * self.plain(x, up, up_bias)


def stored(x: Tensor) -> Tensor:
    """x, and in a compiled graph the promise that it lies in memory (as_strided needs an address)."""
    return torch.as_strided(x, x.size(), x.stride()) if torch.compiler.is_compiling() else x


def hidden_norm(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    return norm(config, weights, "final_norm", 0, x) if config.norm_position == "pre" else x


def bias_of(weights: Weights, name: str, layer: int) -> Tensor | None:
    bias = weights.get(name + ".bias")
    return None if bias is None else bias[layer]


def rows_of(matrix: Matrix, rows: slice | Tensor | int) -> Matrix:
    scale = matrix.scale
    return Matrix(matrix.data[rows], scale[rows] if scale.numel() else scale)


def head_of(weights: Weights) -> Matrix:
    return matrix_of(weights, "head" if "head" in weights else "embedding")


def embed(weights: Weights, ids: Tensor, dtype: torch.dtype) -> Tensor:  # (T,) -> (T, D)
    return unpack(rows_of(matrix_of(weights, "embedding"), ids)).to(dtype)


# ---- one token ----


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
        seen: Tensor,  # (blocks, 64) fp32: 0 at slots that are seen, UNSEEN elsewhere
        id: Tensor,  # (1,)
        position: Tensor,  # (1,)
        turned: list[Tensor],  # cos and sin of the position, each (1, Dh/2); empty without RoPE
        learned: list[Tensor],  # the row of the learned position, (1, D); empty without
    ) -> Tensor:  # (V,) fp32
        config = self.config
        x = embed(weights, id, torch.float32)
        if learned:
            x = x + learned[0]
        x = stored(x)
        for layer in range(config.n_layers):
            memory = (keys[layer], values[layer])

            def attend(q: Tensor, k: Tensor, v: Tensor, memory: tuple[Tensor, Tensor] = memory) -> Tensor:
                remember(memory, k, v, position)
                return attend_one(q, memory, seen)

            rotated = (turned[0], turned[1]) if turned else None
            x = block(config, weights, layer, x, rotated, WithOne(), attend, self.mixture(weights))
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


def cache_shapes(config: ModelConfig, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a layer's keys and values. A head that is no multiple of 16 wide fills its vectors less."""
    lanes = math.gcd(config.head_dim, LANES)
    keys = (blocks, config.n_kv_heads, SLOTS // LANES, config.head_dim, LANES)
    return keys, (blocks, config.n_kv_heads, config.head_dim // lanes, SLOTS, lanes)


def remember(memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, positions: Tensor) -> None:
    """Writes k and v (T, K, Dh) at `positions` (T,)."""
    keys, values = memory
    lanes = values.shape[-1]
    block, slot = positions // SLOTS, positions % SLOTS
    block, slot = block[:, None, None], slot[:, None, None]  # (T, 1, 1)
    head, dim = torch.arange(k.shape[1])[:, None], torch.arange(k.shape[2])  # (K, 1), (Dh,)
    keys.index_put_((block, head, slot // LANES, dim, slot % LANES), k.to(keys.dtype))
    values.index_put_((block, head, dim // lanes, slot, dim % lanes), v.to(values.dtype))


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
    return _package(config, precision, cache_dtype).is_file()


def _package(config: ModelConfig, precision: str, cache_dtype: torch.dtype) -> Path:
    """The file of the compiled step, named for all that ends up in it."""
    return graph_file("step", [_source(), repr(config), f"{precision} {cache_dtype}"])


@cache
def _source() -> str:
    parts: tuple[Any, ...] = (stack_weights, _joined, matrix_of, block, dense, norm, bias_of, stored, hidden_norm)
    parts += (head_of, rows_of, embed, Products, WithOne, Step, remember, attend_one, _export, unpack, rotate)
    return f"{SLOTS} {LANES} {GROUP}" + sources(*parts)


def compile_seconds(config: ModelConfig) -> float:
    """About how long `compiled` takes the first time: 16 s for 4 layers and 30 s for 12 on two idle cores (LOG.md).

    What k experts of a layer add is a guess: k layers.
    """
    return 10 + 1.7 * config.n_layers * (1 if not config.is_moe else config.n_experts_per_token)


def is_worth_compiling(config: ModelConfig, weight_bytes: int, new_tokens: int, precision: str = "fp32") -> bool:
    """Whether so many tokens repay the compiling. `weight_bytes` are those in fp32.

    A line through what the step saves a token of three models (LOG.md): 13.6 ms of mini-llama's 17.9, where this says
    11.6, so that it pays from some 2,700 tokens on. Below fp32 the plain route unpacks every matrix for every token,
    which took 21 ms more for int8, 24 for bf16 and 39 for int4.
    """
    saved = weight_bytes / 22e9 + 0.42e-3 * config.n_layers
    if precision != "fp32":
        saved += weight_bytes / 6.7e9
    return new_tokens * saved > compile_seconds(config)


def decoder_for(model: nn.Module, reach: int, new_tokens: int) -> "Decoder | None":
    """An exact decoder in the model's precision where it is the faster way to `new_tokens` of one text, else None.

    It is where the compiled step lies in the cache folder, or where so many tokens repay compiling it. Then as without
    it activations and cache are fp32, so that no text depends on what lies in a cache folder.
    """
    if not isinstance(model, Transformer):
        return None
    config, precision = model.config, precision_of(model)
    plain = precision != "fp32" or model.token_embedding.weight.dtype == torch.float32
    if next(_tensors(model)).device.type != "cpu" or not plain or new_tokens < 2:
        return None
    if not is_compiled(config, precision):
        if not is_worth_compiling(config, 4 * total_parameters(config), new_tokens, precision):
            return None
        if compiler() is None:
            print("note: no C++ compiler (g++, or CXX): text is generated the plain, slower way", file=sys.stderr)
            return None
    try:
        return Decoder(model, reach=reach, exact=True)
    except ClockhandError as error:  # the cache folder cannot be written, say
        print(f"note: {error}: text is generated the plain, slower way", file=sys.stderr)
        return None


def compiled(config: ModelConfig, precision: str, cache_dtype: torch.dtype, inputs: tuple[Any, ...]) -> Run:
    """The step as a function of its flat inputs, out of the cache folder, or compiled into it.

    `inputs` are an example. Raises `ClockhandError` where it has to be compiled and no C++ compiler is found.
    """
    return load_or_compile(_package(config, precision, cache_dtype), lambda: _export(config, inputs))


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


# ---- one text ----


@dataclass(frozen=True)
class DecoderInfo:
    """What a decoder is made of."""

    precision: str
    weight_bytes: int
    """Read once a token."""
    compile_seconds: float
    """0 where the step was loaded."""


class Decoder:
    """One text on its way through a model: its cache, and the two ways to go on. Not for two threads at once."""

    def __init__(
        self,
        model: Transformer,
        precision: str | None = None,
        reach: int | None = None,
        compile: bool = True,
        exact: bool = False,
    ) -> None:
        """Copies the weights of `model` in `precision` (default: its own), unless they are kept (`keep_weights`).

        `reach` (default: the model's max_seq_len) is the most tokens the text may have, and what `dynamic` RoPE scaling
        adapts to. Without `compile` the step runs as it is written, slowly. Below fp32 the prompt is read and the cache
        kept in bf16; `exact` leaves both in fp32, as the plain model has them. Raises `ClockhandError` for a precision
        that the model cannot have, and where a step must be compiled and there is no C++ compiler.
        """
        keep_freed_memory(SCRATCH)
        own = precision_of(model)
        precision = own if precision is None else precision
        check_precision(precision)
        if own not in ("fp32", precision):
            raise ClockhandError(f"the weights are {own} already and cannot become {precision}")
        self.config, self.precision = model.config, precision
        config = model.config
        self.reach = config.max_seq_len if reach is None else reach
        if self.reach < 1 or (config.position == "learned" and self.reach > config.max_seq_len):
            raise ClockhandError(f"reach = {self.reach} must be between 1 and max_seq_len = {config.max_seq_len}")
        self.length = 0
        """Tokens held."""
        self._written = 0  # the most that were ever held: a ring remembers the last of those
        with torch.no_grad():
            self.weights = _weights(model, precision)
            table = model.position_embedding
            self._learned = None if table is None else table.weight.detach().float()
        low = precision != "fp32" and not exact
        self.cache_dtype = torch.bfloat16 if low else torch.float32
        self.read_dtype = torch.bfloat16 if low and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
        self._products = WithManyFused() if torch.backends.mkldnn.is_available() else WithMany()
        self._turned: list[Tensor] = []
        if config.position == "rope":
            positions = torch.arange(self.reach)[None]
            lengths = torch.full((1, 1), self.reach) if config.rope_scaling == "dynamic" else None
            self._turned = [each[0] for each in rotation(config, positions, lengths)]  # each (reach, Dh/2)
        self._ring = 0
        """Slots of the cache, where a sliding window leaves fewer than `reach` to remember; the slot of a position is
        then its remainder. 0: as many as there are tokens."""
        if config.sliding_window and (ring := -(-(config.sliding_window + SPARE) // SLOTS) * SLOTS) < self.reach:
            self._ring = ring
        self._slots = torch.arange(self.reach) % (self._ring or self.reach)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._seen = torch.empty(0, SLOTS)
        self._views: list[Tensor] = []
        self._reserve(4 * SLOTS)
        self._run: Run | None = None
        started, known = time.perf_counter(), is_compiled(config, precision, self.cache_dtype)
        if compile:
            example = self._inputs(torch.zeros(1, dtype=torch.int64), 0, 4)
            self._run = compiled(config, precision, self.cache_dtype, example)
        seconds = 0.0 if known or not compile else time.perf_counter() - started
        self.info = DecoderInfo(precision, self._bytes_read(), seconds)

    def _bytes_read(self) -> int:
        share = self.config.n_experts_per_token / self.config.n_experts if self.config.is_moe else 1.0
        tied = self.config.tie_embeddings
        total = 0.0
        for name, tensor in self.weights.items():
            if not tied and name.startswith("embedding"):
                continue  # one row of it
            total += tensor.nbytes * (share if name.split(".")[0] in ("gate", "up", "down") else 1)
        return round(total)

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids`; the logits after the last, (V,) fp32. Memory beside the cache does not grow with their number.

        Raises `ClockhandError` for an id beyond the vocabulary, for none at all, or for more than `reach` in all.
        """
        self._check(ids)
        numbers = torch.tensor(ids, dtype=torch.int64)
        x = torch.empty(0)
        for start in range(0, len(ids), CHUNK):
            x = self._read_chunk(numbers[start : start + CHUNK], last=start + CHUNK >= len(ids))
        head = unpack(head_of(self.weights)).to(x.dtype)
        return F.linear(hidden_norm(self.config, self.weights, x[-1:]), head)[0].float()

    @torch.no_grad()
    def step(self, id: int) -> Tensor:
        """Appends one id; the logits after it, (V,) fp32. Raises `ClockhandError` as `read` does."""
        self._check((id,))
        position = self.length
        self._reserve(position + 1)
        self.length += 1
        self._written = max(self._written, self.length)
        self._see(position)
        blocks = max(2, -(-min(self.length, self._ring or self.length) // SLOTS))
        number = torch.tensor((id,))
        if self._run is None:
            return Step(self.config)(*self._inputs(number, position, blocks))
        if len(self._views) == 0 or self._views[-1].shape[0] != blocks:  # sixty tensors: only every 64 tokens
            _, keys, values, seen, *_ = self._inputs(number, position, blocks)
            self._views = [*self.weights.values(), *keys, *values, seen]
        rows = slice(position, self.length)
        now = [number, self._slots[rows], *(each[rows] for each in self._turned)]
        learned = [] if self._learned is None else [self._learned[rows]]
        return self._run([*self._views, *now, *learned])[0]

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Appends `ids` by the better of the two ways; the logits after the last, (V,) fp32."""
        return self.step(ids[0]) if len(ids) == 1 and self.length else self.read(ids)

    def truncate(self, length: int) -> None:
        """Forgets every token at position `length` and beyond.

        Raises `ClockhandError` where a sliding window has let go of what would be seen then: it keeps 64 tokens more.
        """
        if length < 0:
            raise ClockhandError(f"length = {length} must be 0 or more")
        window = self.config.sliding_window
        first = max(0, length - window + 1) if window else 0  # that the next token sees
        if length and self._ring and self._written - first > self._ring:
            raise ClockhandError(
                f"length = {length} is too far back: of {self._written} tokens the sliding window has kept {self._ring}"
            )
        self.length = min(length, self.length)
        self._written = self._written if length else 0
        self._see_all()

    def _see_all(self) -> None:
        window = self.config.sliding_window
        self._seen.fill_(UNSEEN)
        self._seen.view(-1)[self._slots[max(0, self.length - window + 1) if window else 0 : self.length]] = 0

    def _see(self, position: int) -> None:
        window = self.config.sliding_window
        self._seen.view(-1)[self._slots[position]] = 0
        if window and position >= window:
            self._seen.view(-1)[self._slots[position - window]] = UNSEEN

    def _inputs(self, id: Tensor, position: int, blocks: int) -> tuple[Any, ...]:
        rows = slice(position, position + 1)
        return (
            self.weights,
            [each[:blocks] for each in self._keys],
            [each[:blocks] for each in self._values],
            self._seen[:blocks],
            id,
            self._slots[rows],
            [each[rows] for each in self._turned],
            [] if self._learned is None else [self._learned[rows]],
        )

    def _check(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise ClockhandError("nothing to read: at least one id is needed")
        size = self.config.vocab_size
        low, high = min(ids), max(ids)
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise ClockhandError(f"id {wrong} is outside the vocabulary of {size} ids (0 to {size - 1})")
        if self.length + len(ids) > self.reach:
            raise ClockhandError(f"the cache holds at most {self.reach} tokens: {self.length} held and {len(ids)} more")

    def _reserve(self, tokens: int) -> None:
        """Room for `tokens`, by doubling. Zeros, since what is not seen is multiplied by 0, and 0 · NaN is NaN."""
        needed = -(-min(tokens, self._ring or tokens) // SLOTS)
        held = len(self._seen)
        if needed <= held:
            return
        blocks, config = max(needed, 2 * held), self.config
        if self._ring:
            blocks = min(blocks, self._ring // SLOTS)
        for tensors, shape in zip((self._keys, self._values), cache_shapes(config, blocks)):
            old = list(tensors)
            tensors.clear()
            for layer in range(config.n_layers):
                grown = torch.zeros(shape, dtype=self.cache_dtype)
                if old:
                    grown[:held] = old[layer]
                tensors.append(grown)
        seen = torch.full((blocks, SLOTS), UNSEEN)
        seen[:held] = self._seen
        self._seen, self._views = seen, []

    # ---- the prompt ----

    def _read_chunk(self, ids: Tensor, last: bool) -> Tensor:
        """One chunk (T,): what leaves the last block, and of the last chunk only its last token, (1, D)."""
        config, weights, dtype = self.config, self.weights, self.read_dtype
        begin, end = self.length, self.length + len(ids)
        self._reserve(end)
        x = embed(weights, ids, dtype)  # (T, D)
        if self._learned is not None:
            x = x + self._learned[begin:end].to(dtype)
        turned = (self._turned[0][begin:end], self._turned[1][begin:end]) if self._turned else None
        for layer in range(config.n_layers):
            memory = (self._keys[layer], self._values[layer])

            def attend(q: Tensor, k: Tensor, v: Tensor, memory: tuple[Tensor, Tensor] = memory) -> Tensor:
                if self._ring:  # its slots are no longer in order, and hold less than a chunk and a window
                    before = self._slots[max(0, begin - config.sliding_window + 1) : begin]
                    past = recall_slots(memory, before, q.dtype)
                    kept = slice(max(0, len(k) - self._ring), None)
                    remember(memory, k[kept], v[kept], self._slots[begin:end][kept])
                    k, v = torch.cat((past[0], k)), torch.cat((past[1], v))
                    return attend_many(q, k, v, config.sliding_window)
                remember_many(memory, k, v, self._slots[begin:end], begin)
                if begin:
                    k, v = recall(memory, end, q.dtype)
                return attend_many(q, k, v, config.sliding_window)

            only_last = last and layer == config.n_layers - 1  # what else would come out, nobody reads
            x = block(config, weights, layer, x, turned, self._products, attend, self._mix, only_last)
        self.length = end
        self._written = max(self._written, end)
        self._see_all()
        return x

    def _mix(self, x: Tensor, layer: int) -> Tensor:
        """A layer's experts, each on the tokens that chose it."""
        config, weights = self.config, self.weights
        routing = route(
            F.linear(x.float(), weights["router"][layer]), config.n_experts_per_token, config.renormalize_top_k
        )
        answer = torch.zeros_like(x)
        for expert in range(config.n_experts):
            rows, choice = (routing.experts == expert).nonzero(as_tuple=True)
            if len(rows):
                share = routing.weights[rows, choice, None].to(x.dtype)
                thought = dense(config, weights, layer, x[rows], WithMany(), expert=expert)
                answer.index_add_(0, rows, thought * share)
        return answer


class WithMany(Products):
    """x (T, D), W (N, D) -> (T, N), in the type of x: one call of a matrix product."""

    def product(self, x: Tensor, matrix: Matrix) -> Tensor:
        return F.linear(x, unpack(matrix).to(x.dtype))


class WithManyFused(WithMany):
    """The same by oneDNN, which does to a product what is to be done while it still has it in its registers."""

    def plain(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        return self._fused(x, matrix, bias, "none")

    def added(self, x: Tensor, matrix: Matrix, bias: Tensor | None, before: Tensor | None) -> Tensor:
        return self._fused(x, matrix, bias, "none") if before is None else self._with(x, matrix, bias, "add", before)

    def gated(self, x: Tensor, gate: Matrix, gate_bias: Tensor | None, up: Matrix, up_bias: Tensor | None) -> Tensor:
        return self._with(x, up, up_bias, "mul", self._fused(x, gate, gate_bias, "swish"))

    def _fused(self, x: Tensor, matrix: Matrix, bias: Tensor | None, then: str) -> Tensor:
        weight, bias = unpack(matrix).to(x.dtype), None if bias is None else bias.to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "")

    def _with(self, x: Tensor, matrix: Matrix, bias: Tensor | None, then: str, other: Tensor) -> Tensor:
        weight, bias = unpack(matrix).to(x.dtype), None if bias is None else bias.to(x.dtype)
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, weight, bias, then)


def remember_many(memory: tuple[Tensor, Tensor], k: Tensor, v: Tensor, positions: Tensor, begin: int) -> None:
    """`remember`, with whole blocks copied as such."""
    keys, values = memory
    whole = 0 if begin % SLOTS else len(k) // SLOTS * SLOTS
    blocks = slice(begin // SLOTS, (begin + whole) // SLOTS)
    if whole:
        k_blocks = k[:whole].view(-1, SLOTS // LANES, LANES, *k.shape[1:])  # (blocks, 64/16, 16, K, Dh)
        v_blocks = v[:whole].view(-1, SLOTS, v.shape[1], *values.shape[2::2])  # (blocks, 64, K, Dh/16, 16)
        keys[blocks] = k_blocks.permute(0, 3, 1, 4, 2).to(keys.dtype)
        values[blocks] = v_blocks.permute(0, 2, 3, 1, 4).to(values.dtype)
    if whole < len(k):
        remember(memory, k[whole:], v[whole:], positions[whole:])


def recall(memory: tuple[Tensor, Tensor], length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of a cache, each (S, K, Dh)."""
    blocks = -(-length // SLOTS)
    keys = memory[0][:blocks].permute(0, 2, 4, 1, 3)  # (blocks, 64/16, 16, K, Dh)
    values = memory[1][:blocks].permute(0, 3, 1, 2, 4)  # (blocks, 64, K, Dh/16, 16)
    return keys.flatten(0, 2)[:length].to(dtype), values.flatten(3).flatten(0, 1)[:length].to(dtype)


def recall_slots(memory: tuple[Tensor, Tensor], slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys and values in `slots` (S,), in their order, each (S, K, Dh)."""
    keys, values = memory
    block, slot = slots // SLOTS, slots % SLOTS
    picked = keys[block, :, slot // LANES, :, slot % LANES]  # (S, K, Dh)
    return picked.to(dtype), values[block, :, :, slot].flatten(2).to(dtype)


def attend_many(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q (T, H, Dh), the last T of the S positions that k and v (S, K, Dh) have -> (T, H, Dh).

    Plain products over a block of queries at a time, each with the keys up to its end, and the heads of a group as rows
    of one matrix. torch's fused kernel took a third of the time of the whole prompt on a CPU (LOG.md).
    """
    length, first, kv_heads = len(q), len(k) - len(q), k.shape[1]
    q = (q / math.sqrt(q.shape[-1])).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # (K, G, T, Dh)
    k, v = k.permute(1, 2, 0).contiguous(), v.transpose(0, 1).contiguous()  # (K, Dh, S), (K, S, Dh)
    later = torch.full((QUERIES, QUERIES), -math.inf, dtype=q.dtype).triu(1)
    attended = []
    for begin in range(0, length, QUERIES):
        some = q[:, :, begin : begin + QUERIES]  # (K, G, t, Dh)
        tokens = some.shape[2]
        start, end = first + begin, first + begin + tokens
        start = max(0, start - window + 1) if window else 0
        scores = torch.bmm(some.flatten(1, 2), k[:, :, start:end])  # (K, G·t, S)
        each = scores.view(*some.shape[:3], -1)  # (K, G, t, S)
        if window:
            here = torch.arange(end - tokens, end)
            behind = here[:, None] - torch.arange(start, end)
            each.masked_fill_((behind < 0) | (behind >= window), -math.inf)
        else:  # all that came before this block is seen by all of it
            each[..., -tokens:] += later[:tokens, :tokens]
        mixed = torch.bmm(torch.softmax(scores, dim=-1), v[:, start:end])  # in fp32 within
        attended.append(mixed.view_as(some).permute(2, 0, 1, 3))  # (t, K, G, Dh)
    return torch.cat(attended).flatten(1, 2)
