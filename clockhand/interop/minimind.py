"""MiniMind's checkpoints: a .pth file with a dict of fp16 tensors and nothing else.

The names are Hugging Face's, and so is the order of RoPE. There is no config beside the tensors: sizes are read off
their shapes, and what shapes cannot say is what the project publishes (`PUBLISHED`). Its tokenizer.json is an ordinary
one.

A .pth is a pickle inside a zip, and a pickle may run code: only plain tensors are accepted.
"""

import dataclasses
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.interop import names
from clockhand.interop.exchange import assemble
from clockhand.model.packed import with_config
from clockhand.model.transformer import Transformer

PUBLISHED: dict[str, Any] = dict(max_seq_len=32768, rope_theta=1e6, norm_eps=1e-6)
"""The same in all sizes of MiniMind-3."""
N_HEADS = 8
"""In a checkpoint without QK-norm no shape says how many heads there are; it is this in every published size."""

INFERENCE_ROPE_SCALING: dict[str, Any] = dict(
    rope_scaling="yarn", rope_factor=16.0, rope_original_max_seq_len=2048, rope_attention_factor=1.0
)
"""What the project's switch --inference-rope-scaling stands for."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def read(path: Path) -> Transformer:
    """The model of a .pth file, in its own type of numbers.

    Raises `ClockhandError` for a file with anything but tensors, and for tensors that do not make a MiniMind.
    """
    weights = _load(path)
    config = _config(weights, path)
    theirs = names.hugging_face_tensor

    def weight_of(name: str) -> Tensor:
        if theirs(name) not in weights:
            raise ClockhandError(f"{path}: tensor {theirs(name)} is missing")
        return weights[theirs(name)].clone()  # out of the memory map

    model = assemble(config, weight_of, path, weights[theirs("token_embedding.weight")].dtype)
    known = {theirs(name) for name in model.state_dict()}
    surplus = next((name for name in weights if name not in known), None)
    if surplus is not None:
        raise ClockhandError(f"{path}: tensor {surplus} is not one of MiniMind-3's")
    return model


def with_inference_rope_scaling(model: Transformer) -> Transformer:
    """The same weights under YaRN, as MiniMind's own switch sets it. Raises `ClockhandError` if RoPE is scaled."""
    if model.config.rope_scaling != "none":
        raise ClockhandError(f"rope_scaling = {model.config.rope_scaling} is in the model already")
    return with_config(model, dataclasses.replace(model.config, **INFERENCE_ROPE_SCALING))


def _load(path: Path) -> dict[str, Tensor]:
    """The dict in the file, its tensors still on the disk."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        # torch stores its records as they are. Anything else could unfold to any size.
        whole = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not whole or sum(entry.file_size for entry in entries) > size:
            raise ClockhandError(f"{path} is compressed, or claims more than it holds; torch.save writes neither")
        with warnings.catch_warnings(action="ignore"):  # torch remarks on odd pickles; we refuse them in one line
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except ClockhandError:
        raise
    except Exception as error:  # what a damaged or hostile pickle makes torch raise can be anything
        kind = type(error).__name__
        raise ClockhandError(f"{path} is damaged, or holds more than tensors, and is not loaded ({kind})") from None
    if not isinstance(weights, dict):
        raise ClockhandError(f"{path} holds a {type(weights).__name__}, not a dict of tensors")
    total = 0
    for name, weight in weights.items():
        if not isinstance(name, str) or not isinstance(weight, Tensor):
            raise ClockhandError(f"{path}: {str(name)[:80]} is not a tensor; is this a whole training state?")
        # A view with strides of 0 can be of any size without a byte behind it.
        plain = weight.layout == torch.strided and weight.device.type == "cpu" and weight.is_contiguous()
        if not plain or weight.dtype not in DTYPES:
            raise ClockhandError(f"{path}: {name} is not a plain tensor of fp16, bf16 or fp32")
        total += weight.numel() * weight.element_size()
    if total > 2 * size:  # a tied head may be there twice, backed once
        raise ClockhandError(f"{path}: its tensors have {total} bytes, more than the file")
    return weights


def _config(weights: dict[str, Tensor], path: Path) -> ModelConfig:
    theirs = names.hugging_face_tensor

    def sizes(name: str, dimensions: int) -> tuple[int, ...]:
        weight = weights.get(theirs(name))
        if weight is None or weight.dim() != dimensions:
            raise ClockhandError(f"{path} is no checkpoint of MiniMind: it has no {theirs(name)} of {dimensions} axes")
        return tuple(weight.shape)

    vocab_size, d_model = sizes("token_embedding.weight", 2)
    n_layers = 0
    while theirs(f"blocks.{n_layers}.attention_norm.weight") in weights:
        n_layers += 1
    q_width, kv_width = (sizes(f"blocks.0.attention.{which}_proj.weight", 2)[0] for which in "qk")
    qk_norm = theirs("blocks.0.attention.q_norm.weight") in weights
    head_dim = sizes("blocks.0.attention.q_norm.weight", 1)[0] if qk_norm else q_width // N_HEADS
    if head_dim < 1 or q_width % head_dim or kv_width % head_dim or not kv_width:
        raise ClockhandError(f"{path}: {q_width} and {kv_width} rows of q and k are no whole heads of {head_dim}")
    values: dict[str, Any] = {}
    if theirs("blocks.0.mlp.router.weight") in weights:
        values["n_experts"] = sizes("blocks.0.mlp.router.weight", 2)[0]
        values["d_ff"] = sizes("blocks.0.mlp.experts.0.gate_proj.weight", 2)[0]
    else:
        values["d_ff"] = sizes("blocks.0.mlp.gate_proj.weight", 2)[0]
    head, embedding = weights.get(theirs("lm_head.weight")), weights[theirs("token_embedding.weight")]
    try:
        return ModelConfig(
            vocab_size=vocab_size, d_model=d_model, n_layers=n_layers, n_heads=q_width // head_dim,
            n_kv_heads=kv_width // head_dim, head_dim=head_dim, qk_norm=qk_norm,
            tie_embeddings=head is None or torch.equal(head, embedding), **values, **PUBLISHED,
        )  # fmt: skip
    except ClockhandError as error:
        raise ClockhandError(f"{path}: {error}") from None
