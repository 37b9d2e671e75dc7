"""GGUF, the files of llama.cpp and Ollama: one file with config, weights and tokenizer.

    write(model, tokenizer, path, dtype="q8_0")     architectures llama, qwen2, qwen3, qwen3moe; f32, f16, bf16, q8_0
    read(path)                                      the same ones back

What an architecture computes is fixed in llama.cpp, so each has its list of values it takes for granted, and a model
that is otherwise is refused by the field's name. `llama` pairs neighbouring dimensions in RoPE and the others pair
halves, so for `llama` the rows of q and k are moved, by the number of heads that each has.

The container is read in `gguf_file.py`, the tokenizer translated in `gguf_tokenizer.py`. Writing needs the package
`gguf`. Tensors are written and read one at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.disk import new_file
from clockhand.errors import ClockhandError, unknown_name
from clockhand.interop import gguf_tokenizer, names
from clockhand.interop.exchange import assemble, refuse_others
from clockhand.interop.gguf_file import GGUFFile
from clockhand.model.rope import frequencies, half_to_interleaved, interleaved_to_half
from clockhand.model.transformer import Transformer

DTYPES = ("f32", "f16", "bf16", "q8_0")
LARGEST = {"f16": 65504.0, "q8_0": 65504.0 * 127}
"""Beyond this a weight, or the scale of its block, is infinite."""

_ALWAYS: dict[str, Any] = dict(
    norm="rms", norm_position="pre", residual=True, mlp="swiglu", position="rope", sliding_window=0,
    rope_scaling=("none", "linear", "ntk", "yarn"), rope_beta_fast=32.0, rope_beta_slow=1.0,
)  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_ALWAYS, "rope_scaling": (*_ALWAYS["rope_scaling"], "llama3"), "qk_norm": False, "n_experts": 0},
    "qwen2": {**_ALWAYS, "qk_norm": False, "n_experts": 0, "attention_bias": "qkv", "mlp_bias": False},
    "qwen3": {**_ALWAYS, "qk_norm": True, "n_experts": 0, "attention_bias": "none", "mlp_bias": False},
    "qwen3moe": {**_ALWAYS, "qk_norm": True, "attention_bias": "none", "mlp_bias": False, "renormalize_top_k": True},
}
"""What llama.cpp takes for granted in each."""
INTERLEAVED = ("llama",)
"""The architectures whose RoPE pairs neighbours."""


# ---- writing ----


def write(
    model: Transformer, tokenizer: Tokenizer | None, path: Path, dtype: str = "f32", name: str = "clockhand"
) -> list[str]:
    """Writes one GGUF file and returns what the user should know. `name` is the model's, for people.

    Vectors and routers are always f32, and so are matrices that q8_0 cannot cut into blocks of 32. Raises
    `ClockhandError` for a model or a tokenizer that llama.cpp would run otherwise.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if tokenizer is None:
        raise ClockhandError("GGUF holds the tokenizer too, and this model has none beside it")
    config = model.config
    architecture = _architecture(config)
    tokenizer_keys, notes = gguf_tokenizer.to_keys(tokenizer, config.vocab_size)
    keys = {"general.name": name, **_config_keys(config, architecture), **tokenizer_keys}
    package = _package()
    with new_file(path) as beside:
        writer = package.GGUFWriter(beside, architecture)
        writer.add_file_type(package.LlamaFileType[{"f32": "ALL_F32"}.get(dtype, f"MOSTLY_{dtype.upper()}")])
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        for key, value in keys.items():
            _add(writer, package, key, value)
        try:
            _write_tensors(writer, package, list(_outgoing(model, architecture, dtype)))
        finally:
            writer.close()
    return notes


class _Outgoing(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: Callable[[], Tensor]  # made only when its turn comes


def _package() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise ClockhandError("writing GGUF needs the package gguf: pip install 'clockhand[gguf]'") from None
    return gguf


def _architecture(config: ModelConfig) -> str:
    """The architecture that computes what `config` says. Raises `ClockhandError` naming the field if none does."""
    if config.is_moe:
        name = "qwen3moe"
    elif config.qk_norm:
        name = "qwen3"
    else:
        # llama.cpp's qwen2 insists on whole heads; its llama takes any bias and any head_dim.
        whole_heads = config.n_heads * config.head_dim == config.d_model
        name = "qwen2" if config.attention_bias == "qkv" and not config.mlp_bias and whole_heads else "llama"
    refuse_others(config, ARCHITECTURES[name], f"GGUF's {name}")
    return name


def _config_keys(config: ModelConfig, architecture: str) -> dict[str, Any]:
    keys: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in names.GGUF_KEYS.items()}
    keys |= dict.fromkeys(names.GGUF_HEAD_DIM, config.head_dim)
    if config.is_moe:
        keys |= {theirs: getattr(config, ours) for ours, theirs in names.GGUF_MOE_KEYS.items()}
    if config.rope_scaling == "ntk":  # is a larger base, and nothing else
        stretch = config.rope_factor ** (config.head_dim / (config.head_dim - 2))
        keys[names.GGUF_KEYS["rope_theta"]] = config.rope_theta * stretch
    said = {
        "linear": ("rope_scaling", "rope_factor"),
        "yarn": ("rope_scaling", "rope_factor", "rope_original_max_seq_len"),
        "llama3": ("rope_original_max_seq_len",),  # the rest is a tensor
    }.get(config.rope_scaling, ())
    keys |= {names.GGUF_ROPE_KEYS[ours]: getattr(config, ours) for ours in said}
    if config.rope_attention_factor is not None:
        # llama.cpp multiplies this onto YaRN's own factor.
        more = config.rope_attention_factor / _yarn_factor(config.rope_factor)
        keys[names.GGUF_ROPE_KEYS["rope_attention_factor"]] = more
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def _yarn_factor(factor: float) -> float:
    """What cos and sin are multiplied by when a file says nothing of it."""
    return 0.1 * float(np.log(factor)) + 1.0


def _add(writer: Any, package: ModuleType, key: str, value: Any) -> None:
    """Adds a key with the type that llama.cpp expects of such a value."""
    kinds = package.GGUFValueType
    if isinstance(value, list):
        inner = {str: kinds.STRING, float: kinds.FLOAT32, int: kinds.INT32}[type(value[0])]
        writer.add_key_value(key, value, kinds.ARRAY, sub_type=inner)
    else:
        kind = {str: kinds.STRING, float: kinds.FLOAT32, int: kinds.UINT32, bool: kinds.BOOL}[type(value)]
        writer.add_key_value(key, value, kind)


def _outgoing(model: Transformer, architecture: str, dtype: str) -> Iterator[_Outgoing]:
    """All tensors in the order of the model; the experts of a layer as one."""
    config = model.config
    experts: dict[str, list[Tensor]] = {}
    if config.rope_scaling == "llama3":
        divisors = _plain_frequencies(config.rope_theta, config.head_dim) / frequencies(config)
        yield _Outgoing(names.GGUF_ROPE_DIVISORS, (config.head_dim // 2,), "f32", lambda: divisors)
    for name, parameter in model.named_parameters():
        theirs, expert = names.gguf_tensor(name)
        if expert is not None:
            experts.setdefault(theirs, []).append(parameter)
            if len(experts[theirs]) == config.n_experts:
                shape = (config.n_experts, *parameter.shape)
                yield _Outgoing(theirs, shape, _stored_as(name, shape, dtype), _stack(experts.pop(theirs)))
            continue
        weight = _move(name, parameter, config, config.rope_layout, _layout(architecture))
        shape = tuple(parameter.shape)
        yield _Outgoing(theirs, shape, _stored_as(name, shape, dtype), weight)


def _stack(parameters: list[Tensor]) -> Callable[[], Tensor]:
    return lambda: torch.stack(parameters)


def _stored_as(name: str, shape: tuple[int, ...], dtype: str) -> str:
    exact = len(shape) == 1 or ".router." in name or (dtype == "q8_0" and shape[-1] % 32)
    return "f32" if exact else dtype


def _write_tensors(writer: Any, package: ModuleType, tensors: list[_Outgoing]) -> None:
    for tensor in tensors:
        kind = package.GGMLQuantizationType[tensor.dtype.upper()]
        block, block_bytes = package.GGML_QUANT_SIZES[kind]
        size = int(np.prod(tensor.shape)) // block * block_bytes
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        values = tensor.values().detach().float().cpu().contiguous().numpy()
        largest = float(np.abs(values).max(initial=0))
        if largest > LARGEST.get(tensor.dtype, np.inf):
            raise ClockhandError(f"{tensor.name} has a weight of {largest:.4g}, which {tensor.dtype} cannot hold")
        writer.write_tensor_data(package.quantize(values, package.GGMLQuantizationType[tensor.dtype.upper()]))


# ---- reading ----


def read(path: Path, dtype: torch.dtype | None = None) -> tuple[Transformer, Tokenizer]:
    """The model and the tokenizer of a GGUF file, in `dtype` (None: the file's own; fp32 for q8_0).

    Raises `ClockhandError` for a file that is not sound, or that says what we could not honour.
    """
    file = GGUFFile(path)
    config = _config(file)
    tokenizer = gguf_tokenizer.from_keys(file.keys, path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ClockhandError(f"{path}: {tokenizer.vocab_size} tokens, but an embedding of {config.vocab_size} rows")
    dtype = dtype or file.dtype(names.gguf_tensor("token_embedding.weight")[0])
    architecture = file.keys["general.architecture"]
    model = assemble(config, lambda name: _incoming(file, config, architecture, name), path, dtype)
    _refuse_surplus(file, model)
    return model, tokenizer


def is_f32(path: Path) -> bool:
    """Whether all numbers in a GGUF file are fp32."""
    file = GGUFFile(path)
    return all(file.is_f32(name) for name in file.tensors)


class _Keys:
    """The keys of one architecture. Each must be asked for, or be harmless."""

    def __init__(self, keys: Mapping[str, Any], architecture: str, source: object) -> None:
        prefix = f"{architecture}."
        self._said = {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}
        self._unread, self._source = set(self._said), source

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of `name`, which must be of type `kind`, or there must be a default."""
        self._unread.discard(name)
        value = self._said.get(name, default)
        if type(value) is not kind:
            raise ClockhandError(f"{self._source}: {name} = {value!r} must be of type {kind.__name__}")
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._said

    def refuse_unread(self) -> None:
        for name in sorted(self._unread - names.GGUF_HARMLESS):
            value = self._said[name]
            if value not in names.GGUF_SAME_AS.get(name, ()):
                raise ClockhandError(f"{self._source}: {name} = {value!r} is nothing that clockhand can honour")


_WHEN_ABSENT = {"rope_theta": 1e4, "d_ff": 0}  # a file with experts may leave out the width of dense layers


def _config(file: GGUFFile) -> ModelConfig:
    architecture = file.keys.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise unknown_name("architecture", str(architecture), ARCHITECTURES, str(file.path))
    keys = _Keys(file.keys, architecture, file.path)
    embedding = file.tensors.get(names.gguf_tensor("token_embedding.weight")[0])
    if embedding is None or len(embedding.shape) != 2:
        raise ClockhandError(f"{file.path} has no token embedding of two dimensions")

    values: dict[str, Any] = {}
    for name, theirs in names.GGUF_KEYS.items():
        values[name] = keys.get(theirs, float if name in ("norm_eps", "rope_theta") else int, _WHEN_ABSENT.get(name))
    if values["n_heads"] < 1 or values["n_kv_heads"] < 1:  # where 0 would mean "as many as" to us
        raise ClockhandError(f"{file.path}: {values['n_heads']} heads and {values['n_kv_heads']} KV heads cannot be")
    width = values["d_model"] // values["n_heads"]
    head_dim = {keys.get(name, int, width) for name in names.GGUF_HEAD_DIM}
    if len(head_dim) > 1:
        raise ClockhandError(f"{file.path}: {', '.join(names.GGUF_HEAD_DIM)} differ, but clockhand has one head_dim")
    values["head_dim"] = head_dim.pop()
    values["vocab_size"] = embedding.shape[0]
    values["tie_embeddings"] = names.gguf_tensor("lm_head.weight")[0] not in file.tensors
    values["qk_norm"] = ARCHITECTURES[architecture]["qk_norm"]
    if architecture == "qwen3moe":
        values |= {name: keys.get(theirs, int) for name, theirs in names.GGUF_MOE_KEYS.items()}
    values["attention_bias"] = _attention_bias(file)
    values["mlp_bias"] = names.gguf_tensor("blocks.0.mlp.up_proj.bias")[0] in file.tensors
    values |= _rope(file, keys, values)
    keys.refuse_unread()
    try:
        config = ModelConfig(**values)
    except ClockhandError as error:
        raise ClockhandError(f"{file.path}: {error}") from None
    refuse_others(config, ARCHITECTURES[architecture], f"GGUF's {architecture}")
    return config


def _attention_bias(file: GGUFFile) -> str:
    q, o = (names.gguf_tensor(f"blocks.0.attention.{which}_proj.bias")[0] in file.tensors for which in "qo")
    return "all" if o else "qkv" if q else "none"


def _rope(file: GGUFFile, keys: _Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that scale RoPE."""
    words = names.GGUF_ROPE_KEYS
    kind = keys.get(words["rope_scaling"], str, "none")
    factor = keys.get(words["rope_factor"], float, 1.0)
    original = keys.get(words["rope_original_max_seq_len"], int, 0)
    if names.GGUF_ROPE_DIVISORS in file.tensors:
        return _llama3(file, sizes["rope_theta"], sizes["head_dim"], original or 8192)
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if kind not in ("linear", "yarn"):
        raise ClockhandError(f"{file.path}: rope scaling {kind!r} must be none, linear or yarn")
    values: dict[str, Any] = {"rope_scaling": kind, "rope_factor": factor}
    if kind == "yarn":
        values["rope_original_max_seq_len"] = original or sizes["max_seq_len"]
        if words["rope_attention_factor"] in keys and factor > 0:
            more = keys.get(words["rope_attention_factor"], float)
            values["rope_attention_factor"] = float(f"{more * _yarn_factor(factor):.6g}")  # undoes fp32's rounding
    return values


def _llama3(file: GGUFFile, theta: float, head_dim: int, original: int) -> dict[str, Any]:
    """Llama 3's scaling, found from the divisors that it leads to; they are all that a file has of it."""
    if file.tensors[names.GGUF_ROPE_DIVISORS].shape != (head_dim // 2,) or head_dim < 2:
        raise ClockhandError(f"{file.path}: {names.GGUF_ROPE_DIVISORS} must have {head_dim // 2} numbers")
    divisors = file.read(names.GGUF_ROPE_DIVISORS).double()
    values: dict[str, Any] = dict(
        rope_scaling="llama3",
        rope_factor=float(f"{float(divisors.max()):.6g}"),
        rope_original_max_seq_len=original,
    )
    try:
        guess = ModelConfig(
            vocab_size=1, d_model=1, n_layers=1, n_heads=1, d_ff=1, head_dim=head_dim, rope_theta=theta, **values
        )
    except ClockhandError as error:
        raise ClockhandError(f"{file.path}: {names.GGUF_ROPE_DIVISORS}: {error}") from None
    if not torch.allclose(_plain_frequencies(theta, head_dim) / frequencies(guess), divisors, rtol=1e-4):
        raise ClockhandError(f"{file.path}: {names.GGUF_ROPE_DIVISORS} is not Llama 3's scaling")
    return values


def _incoming(file: GGUFFile, config: ModelConfig, architecture: str, name: str) -> Tensor:
    """The tensor that we call `name`."""
    theirs, expert = names.gguf_tensor(name)
    if theirs not in file.tensors:
        raise ClockhandError(f"{file.path}: tensor {theirs} is missing")
    if expert is None:
        return _move(name, file.read(theirs), config, _layout(architecture), "half")()
    if file.tensors[theirs].shape[0] != config.n_experts:
        raise ClockhandError(f"{file.path}: {theirs} must hold {config.n_experts} experts")
    return file.read(theirs, part=expert)


def _refuse_surplus(file: GGUFFile, model: Transformer) -> None:
    known = {names.gguf_tensor(name)[0] for name, _ in model.named_parameters()}
    surplus = next((name for name in file.tensors if name not in known | {names.GGUF_ROPE_DIVISORS}), None)
    if surplus is not None:
        raise ClockhandError(f"{file.path}: tensor {surplus} is nothing that clockhand can honour")


# ---- RoPE ----


def _plain_frequencies(theta: float, head_dim: int) -> Tensor:
    """What the frequencies are without scaling, float64 (Dh/2,)."""
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _layout(architecture: str) -> str:
    return "interleaved" if architecture in INTERLEAVED else "half"


def _move(name: str, weight: Tensor, config: ModelConfig, source: str, target: str) -> Callable[[], Tensor]:
    """A call that gives `weight` with its rows in the layout `target`, if it is one that RoPE's layout orders."""
    follows = name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm")
    if not follows or source == target:
        return lambda: weight
    move = half_to_interleaved if target == "interleaved" else interleaved_to_half
    return lambda: move(weight.detach(), config.head_dim)
