"""A model whose matrices lie packed in memory: rounded once, unpacked by every call that multiplies with them.

    fp32    as trained
    bf16    half the bytes, 8 bits of mantissa
    int8    w ≈ q · scale, one scale a row          q = round(w / scale), scale = max|row| / 127
    int4    w ≈ (q - 8) · scale, one scale of 16 bits for each group of 32 columns; two numbers in a byte

`packed` makes one of any model, and what it computes is, to the bit, what the rounded weights as fp32 numbers would:
activations stay in fp32. It saves memory, not time; the fast way reads the packed numbers themselves
(`infer/step.py`). Not for training: there are no gradients into rounded numbers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError, unknown_name
from clockhand.model.transformer import Transformer, without_weights

PRECISIONS = ("fp32", "bf16", "int8", "int4")
GROUP = 32
"""Columns that share a scale in int4."""


@dataclass(frozen=True)
class Matrix:
    """A matrix (..., N, D) as it is stored. The scale is an empty tensor where there is none."""

    data: Tensor  # (..., N, D) fp32, bf16 or int8; for int4 (..., N, D/2) uint8
    scale: Tensor  # int8: (..., N) fp32; int4: (..., N, D/32) fp32

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes


def check_precision(precision: str, name: str = "precision") -> None:
    if precision not in PRECISIONS:
        raise unknown_name(name, precision, PRECISIONS)


def pack(weight: Tensor, precision: str) -> Matrix:
    """`weight` (..., N, D) rounded to `precision`. Raises `ClockhandError` where int4's groups do not fit."""
    check_precision(precision)
    weight = weight.detach().float()
    none = torch.empty(0)
    if precision == "fp32":
        return Matrix(weight.contiguous(), none)
    if precision == "bf16":
        return Matrix(weight.to(torch.bfloat16).contiguous(), none)
    if precision == "int8":
        scale = _scale(weight.abs().amax(-1), 127)  # (..., N)
        return Matrix((weight / scale[..., None]).round().to(torch.int8), scale)
    _check_groups(weight.shape[-1])
    groups = weight.unflatten(-1, (-1, GROUP))  # (..., N, D/32, 32)
    scale = _scale(groups.abs().amax(-1), 7).bfloat16().float()  # (..., N, D/32), as the step reads them
    numbers = ((groups / scale[..., None]).round() + 8).to(torch.uint8)  # 1 to 15
    low, high = numbers.chunk(2, dim=-1)  # byte j of a group holds columns j and j + 16
    return Matrix((low | (high << 4)).flatten(-2).contiguous(), scale)


def unpack(matrix: Matrix) -> Tensor:
    """The weights that `matrix` stands for, (..., N, D): bf16 as such, everything else fp32."""
    data, scale = matrix.data, matrix.scale
    if data.dtype == torch.uint8:
        groups = data.unflatten(-1, (-1, GROUP // 2))  # (..., N, D/32, 16)
        numbers = torch.cat((groups & 15, groups >> 4), dim=-1).float() - 8
        return (numbers * scale[..., None]).flatten(-2)
    return data.float() * scale[..., None] if data.dtype == torch.int8 else data


def _check_groups(columns: int) -> None:
    if columns % GROUP:
        raise ClockhandError(f"int4 needs rows of a multiple of {GROUP} weights, not {columns}")


def _scale(largest: Tensor, levels: int) -> Tensor:
    return (largest / levels).clamp(min=1e-12)  # a row of zeros is 0 times anything


# ---- a model of them ----


class Packed(nn.Module):
    """What a packed linear layer and a packed embedding have in common."""

    data: Tensor
    scale: Tensor

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.register_buffer("data", matrix.data)
        self.register_buffer("scale", matrix.scale)

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.data, self.scale)

    def unpacked(self) -> Tensor:
        """The matrix in fp32, made anew each time: a call, so that nobody asks for it to learn its type or place."""
        return unpack(self.matrix).float()


class PackedLinear(Packed):
    """y = W · x + b"""

    def __init__(self, matrix: Matrix, bias: nn.Parameter | None = None) -> None:
        super().__init__(matrix)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., N)
        return F.linear(x, self.unpacked(), self.bias)


class PackedEmbedding(Packed):
    """The rows of a matrix."""

    def forward(self, ids: Tensor) -> Tensor:  # (...) -> (..., D)
        return unpack(Matrix(self.data[ids], self.scale[ids] if self.scale.numel() else self.scale)).float()


def weight_of(layer: nn.Module) -> Tensor:
    """The matrix of a linear layer or an embedding, packed or not; a packed one is unpacked by this call."""
    return layer.unpacked() if isinstance(layer, Packed) else layer.get_parameter("weight")


def precision_of(model: nn.Module) -> str:
    """bf16, int8 or int4 of a packed model; fp32 of any other, whatever type its weights have."""
    first = next((module for module in model.modules() if isinstance(module, Packed)), None)
    if first is None:
        return "fp32"
    return {torch.bfloat16: "bf16", torch.int8: "int8", torch.uint8: "int4"}[first.data.dtype]


def packed(model: Transformer, precision: str) -> Transformer:
    """The model with its matrices in `precision`, which shares nothing with it but norms, biases and routers.

    For fp32 that is a copy without packing. Raises `ClockhandError` for a model that is packed otherwise.
    """
    check_precision(precision)
    own = precision_of(model)
    if own != "fp32":
        if own == precision:
            return model
        raise ClockhandError(f"the weights are {own} already and cannot become {precision}")
    weights: dict[str, Tensor] = {}
    places = without_packed_weights(model.config, precision)
    for name, place in places.named_modules():
        if isinstance(place, Packed):
            matrix = pack(model.get_parameter(f"{name}.weight"), precision)
            weights |= {f"{name}.data": matrix.data, f"{name}.scale": matrix.scale}
    weights |= {
        name: tensor.detach().float().clone()
        for name, tensor in model.state_dict().items()
        if name in places.state_dict()
    }
    return with_weights(places, weights)


def without_packed_weights(config: ModelConfig, precision: str) -> Transformer:
    """The model with shapes but no storage, its matrices being places for those of `precision`."""
    model = without_weights(config)
    if precision == "fp32":
        return model
    for name, module in list(model.named_modules()):
        if name.endswith(("position_embedding", "router")):
            continue  # a table that is not multiplied by; small differences that decide where a token goes
        place: nn.Module
        if isinstance(module, nn.Embedding):
            place = PackedEmbedding(_place(module.weight, precision))
        elif isinstance(module, nn.Linear):
            place = PackedLinear(_place(module.weight, precision), module.bias)
        else:
            continue
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, place)
    return model


def with_weights(model: Transformer, weights: dict[str, Tensor]) -> Transformer:
    """`model`, made without weights, with those of `weights` by name, not copied; a tied head may be missing there."""
    if model.config.tie_embeddings:
        embedding = {name: each for name, each in weights.items() if name.startswith("token_embedding.")}
        weights = weights | {name.replace("token_embedding", "lm_head"): each for name, each in embedding.items()}
    model.load_state_dict(weights, assign=True)
    if precision_of(model) == "fp32":
        model.tie()
    return model.eval()


def with_config(model: Transformer, config: ModelConfig) -> Transformer:
    """The same weights, not copied, under another config, packed or not; `config` must ask for the same shapes."""
    return with_weights(without_packed_weights(config, precision_of(model)), model.state_dict()).train(model.training)


def _place(weight: Tensor, precision: str) -> Matrix:
    rows, columns = weight.shape
    if precision == "bf16":
        return Matrix(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), torch.empty(0, device="meta"))
    if precision == "int8":
        return Matrix(torch.empty(rows, columns, dtype=torch.int8, device="meta"), torch.empty(rows, device="meta"))
    _check_groups(columns)
    return Matrix(
        torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta"),
        torch.empty(rows, columns // GROUP, device="meta"),
    )
