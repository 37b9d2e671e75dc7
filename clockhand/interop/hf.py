"""Hugging Face folders, the native form of a model: what we save opens in transformers and vLLM as it is.

    save_model(model, folder, tokenizer=...)    config.json, generation_config.json, model.safetensors, tokenizer, card
    load_model(folder)                          ours or anybody's, of the families in `names.py`
    read_config(folder)                         the config alone, without torch
    end_ids(folder)                             where its text ends

Loading is strict: every tensor that is missing, surplus or of another shape is named, and no weight is left at random.
Tensors are read one at a time out of a memory map into their final place, so a file needs its size once, not twice.

A model whose RoPE pairs neighbours (`rope_layout: interleaved`) is written with the rows of q and k in Hugging Face's
order, and put back when it is read here.

Torch is imported where tensors are touched, so that configs can be read without it.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.interop import folders, names
from clockhand.interop.folders import find_model_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from clockhand.data.tokenizer import Tokenizer
    from clockhand.model.transformer import Transformer

__all__ = ["end_ids", "find_model_folder", "load_model", "read_config", "save_model"]

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types of stored numbers that are read: safetensors' word and torch's."""


# ---- reading ----


def read_config(folder: str | Path) -> ModelConfig:
    """The config of a model folder. Raises `ClockhandError` for what we could not compute as the file means it."""
    file = Path(folder) / folders.CONFIG
    try:
        return names.from_hugging_face(folders.read_json(file), str(file))
    except RecursionError:
        raise ClockhandError(f"{file} is nested too deeply") from None


def end_ids(folder: str | Path) -> tuple[int, ...]:
    """Every id that ends a text of this model: those of generation_config.json, or else of config.json."""
    folder = Path(folder)
    file = next((folder / name for name in (folders.GENERATION, folders.CONFIG) if (folder / name).is_file()), None)
    declared = folders.read_json(file).get("eos_token_id") if file else None
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if any(type(id) is not int for id in ids):
        raise ClockhandError(f"eos_token_id = {declared!r} in {file} must be an id or a list of ids")
    return tuple(ids)


def load_model(folder: str | Path, dtype: "torch.dtype | None" = None) -> "Transformer":
    """The model in a folder, in evaluation mode, with weights of `dtype` (default: the widest type in the file).

    Raises `ClockhandError` that names the first tensors that are missing, surplus or of another shape.
    """
    import torch

    folder = Path(folder)
    config = read_config(folder)
    with _opened(folder) as stored:
        model = _without_weights(config, stored, folder)
        names_there = {_name_there(config, name): name for name in model.state_dict()}
        tied = _name_there(config, "lm_head.weight") if config.tie_embeddings else None
        _check_names_and_shapes(folder, model, stored, names_there, tied)
        if tied in stored:
            embedding = stored[_name_there(config, "token_embedding.weight")].read()
            if not torch.equal(stored[tied].read(), embedding):
                raise ClockhandError(f"{folder}: {tied} differs from the embedding, though the config ties them")
        if dtype is None:
            kinds = [getattr(torch, DTYPES[each.dtype]) for each in stored.values()]
            dtype = max(kinds, key=lambda kind: kind.itemsize)

        weights = {}
        for theirs, ours in names_there.items():
            if theirs != tied:
                tensor = stored[theirs].read()
                weights[ours] = torch.empty(tensor.shape, dtype=dtype).copy_(_from_half(config, ours, tensor))
    model.load_state_dict(weights, strict=False, assign=True)  # strict already, and with better words
    if config.tie_embeddings:
        model.lm_head.weight = model.token_embedding.weight
    return model.eval()


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, not read yet."""

    shape: tuple[int, ...]
    dtype: str
    read: "Callable[[], Tensor]"


@contextmanager
def _opened(folder: Path) -> "Iterator[dict[str, _Stored]]":
    """All tensors of a folder by their names there, experts one by one. They can be read inside the context."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as files:
        stored: dict[str, _Stored] = {}
        for file in folders.weight_files(folder):
            try:
                handle = files.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise folders.unreadable(file, error) from None
            for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                if name in stored:
                    raise ClockhandError(f"{folder} holds the tensor {name} twice")
                if not name.endswith(names.COMPUTED_TENSORS):
                    stored[name] = _stored(handle, name, file)
        yield _separate_experts(stored)


def _stored(handle: Any, name: str, file: Path) -> _Stored:
    part = handle.get_slice(name)
    if part.get_dtype() not in DTYPES:
        raise ClockhandError(f"{file}: {name} is of type {part.get_dtype()}; {', '.join(DTYPES)} are read")
    return _Stored(tuple(part.get_shape()), part.get_dtype(), lambda: handle.get_tensor(name))


def _separate_experts(stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """`stored` with every tensor that holds all experts of a layer replaced by one for each expert and projection."""
    separate = {}
    for name, whole in stored.items():
        fused = next((end for end in names.FUSED_EXPERTS if name.endswith(end)), None)
        if fused is None or len(whole.shape) != 3:
            separate[name] = whole
            continue
        layer, projections = name.removesuffix(fused), names.FUSED_EXPERTS[fused]
        rows = whole.shape[1] // len(projections)
        for expert in range(whole.shape[0]):
            for number, projection in enumerate(projections):
                part = slice(number * rows, (number + 1) * rows)
                separate[f"{layer}.mlp.experts.{expert}.{projection}.weight"] = _Stored(
                    (rows, whole.shape[2]), whole.dtype, partial(_part, whole, expert, part)
                )
    return separate


def _part(whole: _Stored, expert: int, rows: slice) -> "Tensor":
    return whole.read()[expert, rows]


def _without_weights(config: ModelConfig, stored: dict[str, _Stored], folder: Path) -> "Transformer":
    """The model with shapes but no storage."""
    import torch

    from clockhand.model.transformer import Transformer

    parts = config.n_layers * max(config.n_experts, 1)
    if parts > len(stored):  # a billion layers would fill the memory even without weights
        raise ClockhandError(f"{folder}: the config asks for {parts} layers or experts of {len(stored)} stored tensors")
    try:
        with torch.device("meta"):
            return Transformer(config)
    except (RuntimeError, TypeError, OverflowError):
        raise ClockhandError(f"{folder}: the config asks for tensors larger than there can be") from None


def _check_names_and_shapes(
    folder: Path, model: "Transformer", stored: dict[str, _Stored], names_there: dict[str, str], tied: str | None
) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = [theirs for theirs in names_there if theirs not in stored and theirs != tied]
    surplus = [theirs for theirs in stored if theirs not in names_there]
    misshapen = [
        f"{theirs} {stored[theirs].shape} where the config says {shapes[ours]}"
        for theirs, ours in names_there.items()
        if theirs in stored and stored[theirs].shape != shapes[ours]
    ]
    for problem, found in (("missing", missing), ("surplus", surplus), ("of another shape", misshapen)):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ClockhandError(f"{folder}: {problem}: {', '.join(found[:3])}{more}")


# ---- writing ----


def save_model(
    model: "Transformer",
    folder: str | Path,
    tokenizer: "Tokenizer | None" = None,
    tokenizer_files_from: str | Path | None = None,
    dtype: "torch.dtype | None" = None,
    generation: Mapping[str, Any] | None = None,
    card: str = "",
) -> Path:
    """Writes a model folder beside its place and moves it there; returns it.

    The tokenizer is an object of ours, or its files are copied from a folder as they are, generation_config.json
    included. `dtype` (default: as the model is) is fp32, bf16 or fp16. `generation` adds to generation_config.json,
    where `eos_token_id` may be several. `card` is text for the README. An older model in that place is replaced, any
    other folder is refused; when something fails, nothing has changed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder = Path(folder)
    weights = _weights(model, dtype)
    kinds = {str(weight.dtype).removeprefix("torch.") for weight in weights.values()}
    if not kinds <= set(DTYPES.values()):
        raise ClockhandError(f"dtype {', '.join(sorted(kinds))} must be one of {', '.join(DTYPES.values())}")
    kind = kinds.pop() if len(kinds) == 1 else "float32"
    with folders.replacing(folder) as unfinished:
        if tokenizer_files_from is not None:
            _copy_tokenizer(Path(tokenizer_files_from), unfinished)
        if tokenizer is not None:
            tokenizer.save(unfinished)
        generation = _generation(unfinished, tokenizer, generation)
        ids = {f"{role}_token_id": generation.get(f"{role}_token_id") for role in ("bos", "eos", "pad")}
        # Older readers know the type of the weights as torch_dtype.
        config = {**names.to_hugging_face(model.config), "dtype": kind, "torch_dtype": kind, **ids}
        _write_json(unfinished / folders.CONFIG, config)
        _write_json(unfinished / folders.GENERATION, generation)
        (unfinished / folders.CARD).write_text(_card(model, folder.absolute().name, card), encoding="utf-8")
        try:
            save_file(weights, unfinished / folders.WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from None
    return folder


def _weights(model: "Transformer", dtype: "torch.dtype | None") -> "dict[str, Tensor]":
    """What is stored of a model, by the names it has there. Tied weights are stored once."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_embeddings:
            continue
        tensor = _to_half(model.config, name, tensor.detach().cpu())
        weights[_name_there(model.config, name)] = tensor.to(dtype or tensor.dtype).contiguous()
    return weights


def _name_there(config: ModelConfig, name: str) -> str:
    return name if names.family_for(config) is None else names.hugging_face_tensor(name)


def _is_reordered(config: ModelConfig, name: str) -> bool:
    """Whether the rows of a tensor follow the layout of RoPE, and Hugging Face's is another one."""
    follows = name.split(".")[-2] in ("q_proj", "k_proj", "q_norm", "k_norm")
    return follows and config.rope_layout == "interleaved" and names.family_for(config) is not None


def _to_half(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    from clockhand.model.rope import interleaved_to_half

    return interleaved_to_half(tensor, config.head_dim) if _is_reordered(config, name) else tensor


def _from_half(config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
    from clockhand.model.rope import half_to_interleaved

    return half_to_interleaved(tensor, config.head_dim) if _is_reordered(config, name) else tensor


def _copy_tokenizer(source: Path, folder: Path) -> None:
    found = [name for name in (*folders.TOKENIZER_FILES, folders.GENERATION) if (source / name).is_file()]
    if not set(found) & set(folders.TOKENIZER_FILES):
        raise ClockhandError(f"'{source}' holds no tokenizer: none of {', '.join(folders.TOKENIZER_FILES)}")
    for name in found:
        shutil.copyfile(source / name, folder / name)


def _generation(folder: Path, tokenizer: "Tokenizer | None", given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The content of generation_config.json: what a copied one said, the tokenizer's ids, and what is given."""
    copied = folder / folders.GENERATION
    generation = folders.read_json(copied) if copied.is_file() else {}
    if tokenizer is not None:
        ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
        generation |= {f"{role}_token_id": id for role, id in ids.items() if id is not None}
    return {**generation, **(given or {})}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _card(model: "Transformer", title: str, text: str) -> str:
    """The README of a model folder, with the header Hugging Face reads."""
    config, family = model.config, names.family_for(model.config)
    total = sum(parameter.numel() for parameter in model.parameters())
    heads = f"{config.n_heads} query and {config.n_kv_heads} KV heads of {config.head_dim}"
    experts = f" × {config.n_experts} experts, {config.n_experts_per_token} a token" if config.is_moe else ""
    if family is None:
        obstacle = names.export_obstacle(config)
        opening = f"Only clockhand opens it: {obstacle}.\n\n    clockhand generate {title}\n"
    else:
        opening = (
            f"It is a `{family.architecture}`, and opens with transformers, vLLM and clockhand:\n\n"
            f'    AutoModelForCausalLM.from_pretrained("{title}")\n    clockhand generate {title}\n'
        )
        if config.rope_layout == "interleaved":
            opening += "\nIts queries and keys were trained interleaved, and are stored in Hugging Face's order.\n"
    paragraphs = [
        "---\npipeline_tag: text-generation\n" + ("library_name: transformers\n" if family else "") + "---",
        f"# {title}",
        text.strip(),
        f"{total:,} parameters: {config.n_layers} layers of width {config.d_model}, {heads}, "
        f"MLP width {config.d_ff}{experts}, {config.vocab_size} token ids, {config.max_seq_len} positions.",
        opening,
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)
