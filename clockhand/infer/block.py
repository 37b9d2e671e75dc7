"""The arithmetic of one block, for one token, a prompt and many streams: written once, since only two things differ.

    products    how a matrix is multiplied, and what is done to the product at once
    attend      how keys and values are kept and looked at

Those of one token are in `step.py`, those of a prompt in `prompt.py`, those of many streams in `fused.py`. What is
computed is what `model/transformer.py` says, which all three are tested against.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.infer.weights import Weights, bias_of, head_of, joined, matrix_of, rows_of, stack_weights
from clockhand.model.packed import Matrix, unpack
from clockhand.model.rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (T, H, Dh), k and v (T, K, Dh) -> (T, H, Dh)
Mixture = Callable[[Tensor, int], Tensor]  # x (T, D) and the layer -> (T, D)


class Products(ABC):
    """Products with a matrix, and what is done to them at once. Biases (N,) and what is added may be None."""

    @abstractmethod
    def product(self, x: Tensor, matrix: Matrix) -> Tensor: ...  # x (T, D), W (N, D) -> (T, N)

    def plain(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        y = self.product(x, matrix)
        return y if bias is None else y + bias.to(y.dtype)

    def added(self, x: Tensor, matrix: Matrix, bias: Tensor | None, before: Tensor | None) -> Tensor:
        y = self.plain(x, matrix, bias)
        return y if before is None else before + y

    def gated(self, x: Tensor, gate: Matrix, gate_bias: Tensor | None, up: Matrix, up_bias: Tensor | None) -> Tensor:
        return F.silu(self.plain(x, gate, gate_bias)) * self.plain(x, up, up_bias)


def block(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,  # (T, D)
    turned: tuple[Tensor, Tensor] | None,  # cos and sin, each (T, Dh/2)
    products: Products,
    attend: Attend,
    mixture: Mixture | None,  # None: the layers are dense
    only_last: bool = False,
) -> Tensor:  # (T, D)
    """What `Block.forward` computes, without a balance loss; with `only_last`, for the last token alone, (1, D)."""
    q, k, v = before_attending(config, weights, layer, x, turned, products)
    if only_last:
        q, x = q[-1:], x[-1:]
    return after_attending(config, weights, layer, x, attend(q, k, v), products, mixture)


def before_attending(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,  # (T, D)
    turned: tuple[Tensor, Tensor] | None,
    products: Products,
) -> tuple[Tensor, Tensor, Tensor]:
    """x -> q (T, H, Dh), k and v (T, K, Dh)."""
    heads, kv_heads = config.n_heads, config.n_kv_heads
    n = norm(config, weights, "attention_norm", layer, x) if config.norm_position == "pre" else x
    qkv = products.plain(n, matrix_of(weights, "qkv", layer), bias_of(weights, "qkv", layer))
    qkv = stored(qkv).unflatten(-1, (-1, config.head_dim))  # (T, H + 2K, Dh)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if config.qk_norm:
        q, k = norm(config, weights, "q_norm", layer, q), norm(config, weights, "k_norm", layer, k)
    if turned is not None:
        both = torch.cat((q, k), dim=1) if config.qk_norm else qkv[:, : heads + kv_heads]  # (T, H + K, Dh)
        both = stored(turn(both, *turned, config.rope_layout))
        q, k = both.split([heads, kv_heads], dim=1)
    return q, k, v


def after_attending(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,  # (T, D), what came into the block
    attended: Tensor,  # (T, H, Dh)
    products: Products,
    mixture: Mixture | None,  # None: the layers are dense
) -> Tensor:  # (T, D)
    pre = config.norm_position == "pre"
    o, o_bias = matrix_of(weights, "o", layer), bias_of(weights, "o", layer)
    x = stored(products.added(attended.flatten(1), o, o_bias, x if config.residual else None))
    if not pre:
        x = norm(config, weights, "attention_norm", layer, x)

    n = norm(config, weights, "mlp_norm", layer, x) if pre else x
    before = x if config.residual else None
    if mixture is None:
        x = stored(dense(config, weights, layer, n, products, before))
    else:
        update = mixture(n, layer)
        x = stored(update if before is None else before + update)
    return x if pre else norm(config, weights, "mlp_norm", layer, x)


def dense(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    x: Tensor,
    products: Products,
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
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # without memory for the squares
        y = wide * torch.rsqrt(length.square() / width + config.norm_eps)
        y *= weight
    else:
        y = F.layer_norm(x.float(), (width,), weight, weights[name + ".bias"][layer], config.norm_eps)
    return stored(y.to(x.dtype))


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """`rotate` of x (T, heads, Dh) by cos and sin (T, Dh/2); where nothing fuses its passes over memory, with fewer."""
    if torch.compiler.is_compiling() or layout != "half":
        return rotate(x[None], cos[None], sin[None], layout)[0]
    cos, sin = cos[:, None], sin[:, None]  # (T, 1, Dh/2)
    y = x.to(torch.float32, copy=True)
    first, second = y.chunk(2, dim=-1)
    crossed = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(crossed)
    return y.to(x.dtype)


def hidden_norm(config: ModelConfig, weights: Weights, x: Tensor) -> Tensor:
    return norm(config, weights, "final_norm", 0, x) if config.norm_position == "pre" else x


def embed(weights: Weights, ids: Tensor, dtype: torch.dtype) -> Tensor:  # (T,) -> (T, D)
    return unpack(rows_of(matrix_of(weights, "embedding"), ids)).to(dtype)


def stored(x: Tensor) -> Tensor:
    """x, and in a compiled graph the promise that it lies in memory (as_strided needs an address)."""
    return torch.as_strided(x, x.size(), x.stride()) if torch.compiler.is_compiling() else x


IN_EVERY_GRAPH: tuple[Any, ...] = (
    *(stack_weights, joined, matrix_of, bias_of, head_of, rows_of, unpack),
    *(Products, block, before_attending, after_attending, dense, norm, turn, rotate, hidden_norm, embed, stored),
)
"""Whose code a compiled graph depends on, whatever it is for: of other code it would be another graph."""
