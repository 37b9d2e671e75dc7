"""The weights of a model as the fast ways read them, for one text and for many: all layers of a kind in one tensor.

    weights["qkv"]          (L, (H + 2K)·Dh, D)     q, k and v of a layer in one matrix
    weights["qkv.scale"]    int8: (L, rows); int4: (L, rows, D/32); else empty
    weights["gate"]         (L, F, D), with experts (L, E, F, D)

Handing a tensor to a compiled graph costs time, so they are few. Matrices are in the precision asked for, vectors fp32.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from clockhand.allocator import use_large_pages
from clockhand.model.attention import Attention
from clockhand.model.moe import MixtureOfExperts
from clockhand.model.packed import Matrix, Packed, pack
from clockhand.model.transformer import Transformer

T = TypeVar("T")
Weights = dict[str, Tensor]
"""By the names above. Where the matrices lie in an order of their own (`ordered.py`), a list of them, one a layer."""
MATRICES: tuple[str, ...] = ("qkv", "o", "gate", "up", "down")
"""Those of a layer."""


def stack_weights(model: Transformer, precision: str) -> Weights:
    """The weights of `model`, matrices in `precision`: L first, q, k and v in one matrix."""
    config = model.config
    blocks: list[Any] = list(model.blocks)
    weights: Weights = {}

    def kept(module: Any) -> Matrix:
        return module.matrix if isinstance(module, Packed) else pack(module.weight, precision)

    def matrix(name: str, parts: list[Matrix]) -> None:
        stacked = joined(parts, torch.stack)
        weights[name], weights[name + ".scale"] = stacked.data, stacked.scale

    def vector(name: str, parts: list[Tensor | None]) -> None:
        if all(part is not None for part in parts):
            weights[name] = torch.stack([part.detach().float() for part in parts if part is not None])

    def projections(attention: Attention) -> list[Any]:
        return [attention.q_proj, attention.k_proj, attention.v_proj]

    def beside(modules: list[Any]) -> Matrix:
        return joined([kept(each) for each in modules], torch.cat)

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
            matrices.append(joined(parts, torch.stack) if config.is_moe else parts[0])
            if config.mlp_bias:
                bias = torch.stack([linear.bias for linear in linears])
                biases.append(bias if config.is_moe else bias[0])
        matrix(name, matrices)
        if config.mlp_bias:
            vector(name + ".bias", biases)
    if config.is_moe:  # where a token goes is a matter of small differences: not rounded
        weights["router"] = torch.stack([block.mlp.router.weight.detach().float() for block in blocks])
    return weights


def joined(parts: list[Matrix], join: Callable[[list[Tensor]], Tensor]) -> Matrix:
    scales = [part.scale for part in parts]
    return Matrix(join([part.data for part in parts]), join(scales) if scales[0].numel() else scales[0])


def rows_of(matrix: Matrix, rows: slice | Tensor | int) -> Matrix:
    scale = matrix.scale
    return Matrix(matrix.data[rows], scale[rows] if scale.numel() else scale)


def matrix_of(weights: Weights, name: str, layer: int = 0) -> Matrix:
    return rows_of(Matrix(weights[name], weights[name + ".scale"]), layer)


def bias_of(weights: Weights, name: str, layer: int) -> Tensor | None:
    bias = weights.get(name + ".bias")
    return None if bias is None else bias[layer]


def head_of(weights: Weights) -> Matrix:
    return matrix_of(weights, "head" if "head" in weights else "embedding")


_kept: "weakref.WeakKeyDictionary[Transformer, dict[str, Any]]" = weakref.WeakKeyDictionary()
_keeping = threading.RLock()


def keep_weights(model: Transformer) -> None:
    """A promise that the weights of `model` change no more: from now on all its decoders share one copy of them, and
    all its engines another, each made when it is first needed."""
    with _keeping:
        _kept.setdefault(model, {})


def kept_for(model: Transformer, name: str, make: Callable[[], T]) -> T:
    """What `make` gives; where the weights of `model` are kept, what it gave the first time."""
    with _keeping:
        kept = _kept.get(model, {})
        return kept[name] if name in kept else kept.setdefault(name, make())


def weights_of(model: Transformer, precision: str) -> Weights:
    """The weights of `model`, its own copy or the one that is kept."""

    def make() -> Weights:
        weights = stack_weights(model, precision)
        for tensor in weights.values():
            use_large_pages(tensor)
        return weights

    return kept_for(model, precision, make)
