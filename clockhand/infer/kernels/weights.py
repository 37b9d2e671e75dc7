"""A model's weights as the step reads them: every matrix in panels, vectors in fp32. The layout is that of `product.h`.

    rows of W     one panel: 16 rows, interleaved so that a vector holds a few columns of all of them
    q, k, v       one matrix
    gate, up      one matrix: panels of gate and up alternate, so that a thread has both of SiLU(gate) · up

A rounded matrix holds the numbers of `model/packed.py`, in another order.
"""

import ctypes
import re
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clockhand.allocator import use_large_pages
from clockhand.errors import ClockhandError
from clockhand.infer.kernels.library import MLPS, PRECISIONS, Layer, Library, Matrix, Model, Norm
from clockhand.model.moe import MixtureOfExperts
from clockhand.model.packed import GROUP, Packed, PackedEmbedding, PackedLinear, pack, precision_of
from clockhand.model.packed import Matrix as Stored
from clockhand.model.transformer import Transformer

PANEL = 16
COLUMNS = 32
"""Below fp32 a matrix has columns of zeros up to a multiple of this."""


def panels(stored: Stored, precision: str) -> tuple[Tensor, Tensor]:
    """A matrix (N, K) in panels, as bytes (P, bytes of a panel), and its scales (P·16,): of int8, else empty.

    int4's scales lie in the panels.
    """
    data, scale = stored.data, stored.scale
    data = _to_multiple(data, 0, PANEL, zero=0x88 if precision == "int4" else 0)
    count = data.shape[0] // PANEL
    if precision == "fp32":
        return _bytes(data.view(count, PANEL, -1).transpose(1, 2)), torch.empty(0)
    if precision == "bf16":
        data = _to_multiple(data, 1, COLUMNS)
        return _bytes(data.view(count, PANEL, -1, 2).transpose(1, 2)), torch.empty(0)
    if precision == "int8":
        data = (_to_multiple(data, 1, COLUMNS).to(torch.int16) + 128).to(torch.uint8)
        return _bytes(data.view(count, PANEL, -1, 4).transpose(1, 2)), _to_multiple(scale, 0, PANEL).contiguous()
    # Byte j of a group holds columns j and j + 16; in a panel byte (k, row, i) holds 8k + i and 8k + 4 + i.
    groups = data.unflatten(-1, (-1, GROUP // 2))  # (N, groups, 16)
    numbers = torch.cat((groups & 15, groups >> 4), dim=-1).unflatten(-1, (-1, 2, 4))  # (N, groups, 4, 2, 4)
    both = numbers[..., 0, :] | (numbers[..., 1, :] << 4)  # (N, groups, 4, 4)
    both = both.view(count, PANEL, -1, 4, 4).permute(0, 2, 3, 1, 4)  # (P, groups, 4, 16, 4)
    scales = _to_multiple(scale.to(torch.bfloat16), 0, PANEL).view(count, PANEL, -1).transpose(1, 2)  # (P, groups, 16)
    merged = torch.cat((scales.contiguous().view(torch.uint8), both.flatten(2)), dim=-1)
    return _bytes(merged), torch.empty(0)


def _to_multiple(tensor: Tensor, dim: int, multiple: int, zero: int = 0) -> Tensor:
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat((tensor, tensor.new_full(shape, zero)), dim)


def _bytes(panels: Tensor) -> Tensor:
    """(P, ...) of any type as bytes (P, bytes of a panel)."""
    return panels.contiguous().flatten(1).view(torch.uint8)


class PackedModel:
    """A model packed for the step. It holds copies: the model may be dropped, and what is done to it is not seen."""

    @torch.no_grad()
    def __init__(self, model: Transformer, precision: str, library: Library) -> None:
        """`precision` is the model's own where it is packed already."""
        self.config, self.precision, self.library = model.config, precision, library
        self._kept: list[Any] = []  # what the structures point to
        self.nbytes = 0
        """Bytes of all of it."""
        config, blocks = model.config, list(model.blocks)
        layers = (Layer * config.n_layers)()
        for layer, block in zip(layers, blocks):
            self._fill(layer, block)
        embedding = self._matrix([model.token_embedding])
        head = embedding if config.tie_embeddings else self._matrix([model.lm_head])
        table = model.position_embedding
        self.structure = Model(
            precision=PRECISIONS[precision],
            vocab_size=config.vocab_size,
            width=config.d_model,
            layers=config.n_layers,
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            d_ff=config.d_ff,
            experts=config.n_experts,
            experts_per_token=config.n_experts_per_token,
            renormalize=config.renormalize_top_k,
            layer_norm=config.norm == "layer",
            post_norm=config.norm_position == "post",
            residual=config.residual,
            mlp=MLPS[config.mlp],
            interleaved=config.rope_layout == "interleaved",
            window=config.sliding_window,
            norm_eps=config.norm_eps,
            embedding=embedding,
            head=head,
            learned=None if table is None else self._pointer(table.weight.float()),
            final_norm=self._norm(model.final_norm),
            layer=ctypes.cast(layers, ctypes.POINTER(Layer)),
        )
        self._kept.append(layers)

    @property
    def bytes_a_token(self) -> int:
        """Bytes of weights that a step of one row reads."""
        return self._always_read + self._of_experts * self.config.n_experts_per_token // max(1, self.config.n_experts)

    _always_read = 0
    _of_experts = 0

    def _fill(self, layer: Layer, block: Any) -> None:
        attention, mlp = block.attention, block.mlp
        layer.attention_norm, layer.mlp_norm = self._norm(block.attention_norm), self._norm(block.mlp_norm)
        layer.q_norm, layer.k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        layer.qkv = self._matrix([attention.q_proj, attention.k_proj, attention.v_proj])
        layer.o = self._matrix([attention.o_proj])
        experts = list(mlp.experts) if isinstance(mlp, MixtureOfExperts) else [mlp]
        if isinstance(mlp, MixtureOfExperts):
            layer.router = self._pointer(mlp.router.weight.float())
        before = self.nbytes
        for name, matrices in (
            ("up", map(self._up, experts)),
            ("down", (self._matrix([e.down_proj]) for e in experts)),
        ):
            found = (Matrix * len(experts))(*matrices)
            self._kept.append(found)
            setattr(layer, name, ctypes.cast(found, ctypes.POINTER(Matrix)))
        if len(experts) > 1:
            self._of_experts += self.nbytes - before
            self._always_read -= self.nbytes - before

    def _up(self, mlp: Any) -> Matrix:
        if self.config.mlp != "swiglu":
            return self._matrix([mlp.up_proj])
        both = [panels(self._stored(each), self.precision) for each in (mlp.gate_proj, mlp.up_proj)]
        data = torch.stack([data for data, _ in both], dim=1).flatten(0, 1)  # panels alternate
        scale = torch.stack([_panels_of(scale) for _, scale in both], dim=1).flatten()
        bias = None
        if self.config.mlp_bias:
            biases = [_to_multiple(each.bias.float(), 0, PANEL) for each in (mlp.gate_proj, mlp.up_proj)]
            bias = torch.stack([_panels_of(each) for each in biases], dim=1).flatten()
        return self._made(data, scale, bias, data.shape[0] * PANEL, self.config.d_model)

    def _stored(self, module: Any) -> Stored:
        return module.matrix if isinstance(module, Packed) else pack(module.weight, self.precision)

    def _matrix(self, modules: Sequence[Any]) -> Matrix:
        """Matrices below each other as one."""
        stored = [self._stored(module) for module in modules]
        scales = [each.scale for each in stored]
        whole = Stored(
            torch.cat([each.data for each in stored]) if len(stored) > 1 else stored[0].data,
            torch.cat(scales) if len(stored) > 1 and scales[0].numel() else scales[0],
        )
        biases = [getattr(module, "bias", None) for module in modules]
        bias = None if biases[0] is None else torch.cat([each.float() for each in biases if each is not None])
        data, scale = panels(whole, self.precision)
        columns = whole.data.shape[1] * (2 if self.precision == "int4" else 1)
        return self._made(data, scale, bias, whole.data.shape[0], columns)

    def _made(self, data: Tensor, scale: Tensor, bias: Tensor | None, rows: int, columns: int) -> Matrix:
        use_large_pages(data)
        self._always_read += data.nbytes + scale.nbytes
        return Matrix(
            data=self._pointer(data),
            scale=self._pointer(scale.float()) if scale.numel() else None,
            bias=None if bias is None else self._pointer(bias),
            rows=rows,
            columns=columns,
        )

    def _norm(self, module: nn.Module | None) -> Norm:
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        return Norm(
            weight=None if weight is None else self._pointer(weight.float()),
            bias=None if bias is None else self._pointer(bias.float()),
        )

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.detach().clone() if tensor._base is not None or tensor.requires_grad else tensor.contiguous()
        self._kept.append(tensor)
        self.nbytes += tensor.nbytes
        return tensor.data_ptr()


def _panels_of(vector: Tensor) -> Tensor:
    return vector.view(-1, PANEL)


# ---- one packed copy of a model, for all who generate from it ----

Fingerprint = tuple[list[tuple[int, int]], list[float]]
_kept: "weakref.WeakKeyDictionary[Transformer, tuple[Fingerprint, PackedModel]]" = weakref.WeakKeyDictionary()
_keeping = threading.RLock()
SAMPLE = 32
"""Numbers of a tensor that its fingerprint looks at, beside the count of changes that torch keeps."""


def step_precision(model: Transformer) -> str:
    """The precision in which the step has the matrices of `model`: its own; fp16, which the step has not, as fp32."""
    if (kept := _dropped(model)) is not None:
        return kept.precision
    return "bf16" if model.dtype == torch.bfloat16 else precision_of(model)


def packed_for(model: Transformer, library: Library) -> PackedModel:
    """The packed copy of `model`, made where there is none yet or the weights have changed since.

    It is kept for as long as the model is there, unless that is in training: then its next step changes the weights.
    """
    with _keeping:
        if (dropped := _dropped(model)) is not None:
            return dropped
        now = fingerprint(model)
        made, kept = _kept.get(model, (None, None))
        if kept is not None and made == now and kept.library is library:
            return kept
        fresh = PackedModel(model, step_precision(model), library)
        if not model.training:
            _kept[model] = (now, fresh)
        return fresh


def foreign_module(model: Transformer) -> str | None:
    """The name of a layer with matrices of another kind than clockhand's, an adapter's, say, or None."""
    known = {nn.Linear, nn.Embedding, PackedLinear, PackedEmbedding, Dropped}
    matrices = re.compile(r"(_proj|router|lm_head|_embedding)$")
    return next(
        (name for name, each in model.named_modules() if matrices.search(name) and type(each) not in known), None
    )


@torch.no_grad()
def fingerprint(model: Transformer) -> Fingerprint:
    """What changes when the weights do: where they lie, how often torch wrote there, and a sample of the numbers."""
    tensors = [*model.parameters(), *model.buffers()]
    flat = [each.detach().flatten() for each in tensors if each.numel()]
    sample = [each[:: 1 + len(each) // SAMPLE][:SAMPLE].to("cpu", torch.float32) for each in flat]
    return versions(model), torch.cat(sample).tolist() if sample else []


def versions(model: Transformer) -> list[tuple[int, int]]:
    """Where the weights lie, and how often torch wrote there."""
    return [(each.data_ptr(), each._version) for each in (*model.parameters(), *model.buffers())]


class Dropped(nn.Module):
    """Stands where a matrix was that only the step has still."""

    def forward(self, *_: Tensor) -> Tensor:
        raise ClockhandError("the weights lie in the step alone (for_generation=True), and this needs the model itself")


def drop_weights(model: Transformer, library: Library) -> None:
    """Packs `model` for the step and lets go of its own matrices: it generates from now on, and does nothing else."""
    with _keeping:
        packed = packed_for(model.eval(), library)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear | nn.Embedding | Packed):
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, Dropped())
        _kept[model] = (fingerprint(model), packed)


def _dropped(model: Transformer) -> PackedModel | None:
    """The packed copy of a model that has no matrices of its own any more."""
    return _kept[model][1] if isinstance(model.token_embedding, Dropped) else None
