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
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clockhand.config import ModelConfig
from clockhand.disk import new_folder
from clockhand.errors import ClockhandError, unknown_name
from clockhand.interop import folders, names
from clockhand.interop.folders import find_model_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from clockhand.data.tokenizer import Tokenizer
    from clockhand.model.transformer import Transformer

__all__ = ["end_ids", "find_model_folder", "load_model", "read_config", "save_model"]

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types of stored numbers that are read and written: safetensors' word and torch's."""
STORED_PRECISIONS = ("int8", "int4")
"""Packed weights that a folder may hold; in fp32, bf16 and fp16 it is one of Hugging Face's."""
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


# ---- reading ----


def read_config(folder: str | Path) -> ModelConfig:
    """The config of a model folder. Raises `ClockhandError` for what we could not compute as the file means it."""
    file = Path(folder) / folders.CONFIG
    try:
        return names.from_hugging_face(folders.read_json(file), str(file))
    except RecursionError:
        raise ClockhandError(f"{file} is nested too deeply") from None


def end_ids(folder: str | Path) -> tuple[int, ...]:
    """Every id that ends a text of this model."""
    declared = _read_generation(Path(folder)).get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if any(type(id) is not int for id in ids):
        raise ClockhandError(f"eos_token_id = {declared!r} in '{folder}' must be an id or a list of ids")
    return tuple(ids)


def load_model(folder: str | Path, dtype: "torch.dtype | None" = None) -> "Transformer":
    """The model in a folder, in evaluation mode, its weights of `dtype` (default: the type that holds all stored ones).

    Raises `ClockhandError` that names the first tensors that are missing, surplus or of another shape.
    """
    import torch

    folder = Path(folder)
    config = read_config(folder)
    precision = stored_precision(folder)
    if precision is not None:
        if dtype is not None:
            wanted_type = str(dtype).removeprefix("torch.")
            raise ClockhandError(f"'{folder}' holds {precision} weights, which cannot be read as {wanted_type}")
        return _load_packed(folder, config, precision)
    with _opened(folder, config) as stored:
        model = _without_weights(folder, config, stored)
        wanted = {_name_there(config, name): (name, tuple(each.shape)) for name, each in model.state_dict().items()}
        second_head = None
        if config.tie_embeddings:
            head = _name_there(config, "lm_head.weight")
            wanted.pop(head)
            second_head = stored.pop(head, None)
        _check_names_and_shapes(folder, wanted, stored)
        if second_head is not None:
            embedding = stored[_name_there(config, "token_embedding.weight")]
            if not torch.equal(second_head.read(), embedding.read()):
                raise ClockhandError(f"'{folder}': {head} is not the embedding, though the config ties them")

        if dtype is None:
            dtype = reduce(torch.promote_types, (getattr(torch, DTYPES[each.dtype]) for each in stored.values()))
        weights = {}
        for theirs, (ours, shape) in wanted.items():
            weights[ours] = torch.empty(shape, dtype=dtype).copy_(_from_half(config, ours, stored[theirs].read()))
    model.load_state_dict(weights, strict=False, assign=True)  # it was strict above, in the file's own words
    if config.tie_embeddings:
        model.lm_head.weight = model.token_embedding.weight
    return model.eval()


def stored_precision(folder: str | Path) -> str | None:
    """int8 or int4, where the weights of a folder lie packed; None for all other folders."""
    file = Path(folder) / folders.CONFIG
    precision = folders.read_json(file).get(names.WEIGHTS_KEY)
    if precision is not None and precision not in STORED_PRECISIONS:
        raise unknown_name(names.WEIGHTS_KEY, str(precision), STORED_PRECISIONS, str(file))
    return precision


def _load_packed(folder: Path, config: ModelConfig, precision: str) -> "Transformer":
    """The model of a folder with packed weights, which are called and shaped there as in memory."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from clockhand.model.packed import with_weights, without_packed_weights

    weights: dict[str, Tensor] = {}
    for file in folders.weight_files(folder):
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise folders.unreadable(file, error) from None
    _refuse_countless(folder, config, len(weights))
    model = without_packed_weights(config, precision)
    wanted = {name: each for name, each in model.state_dict().items() if not _is_tied(config, name)}
    stored = {
        name: _Stored(tuple(each.shape), str(each.dtype).removeprefix("torch."), lambda each=each: each)  # type: ignore[misc]
        for name, each in weights.items()
    }
    _check_names_and_shapes(folder, {name: (name, tuple(each.shape)) for name, each in wanted.items()}, stored)
    for name, each in wanted.items():
        if weights[name].dtype != each.dtype:
            types = f"{weights[name].dtype} where {precision} means {each.dtype}".replace("torch.", "")
            raise ClockhandError(f"'{folder}': {name} is of type {types}")
    return with_weights(model, weights)


def _is_tied(config: ModelConfig, name: str) -> bool:
    return config.tie_embeddings and name.startswith("lm_head.")


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, not read yet."""

    shape: tuple[int, ...]
    dtype: str
    read: "Callable[[], Tensor]"


@contextmanager
def _opened(folder: Path, config: ModelConfig) -> "Iterator[dict[str, _Stored]]":
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
                    raise ClockhandError(f"'{folder}' holds the tensor {name!r} twice")
                part = handle.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ClockhandError(f"{file}: {name!r} is of type {part.get_dtype()}, not {', '.join(DTYPES)}")
                if not name.endswith(names.COMPUTED_TENSORS):
                    read = partial(handle.get_tensor, name)
                    stored[name] = _Stored(tuple(part.get_shape()), part.get_dtype(), read)
        yield _separate_experts(folder, config, stored)


def _separate_experts(folder: Path, config: ModelConfig, stored: dict[str, _Stored]) -> dict[str, _Stored]:
    """`stored` with every tensor that holds all experts of a layer replaced by one for each expert and projection."""
    separate = {}
    for name, whole in stored.items():
        ending = next((ending for ending in names.FUSED_EXPERTS if name.endswith(ending)), None)
        if ending is None:
            separate[name] = whole
            continue
        projections = names.FUSED_EXPERTS[ending]
        shape = (config.d_model, config.d_ff) if projections == ("down_proj",) else (config.d_ff, config.d_model)
        expected = (config.n_experts, len(projections) * shape[0], shape[1])
        if whole.shape != expected:
            raise ClockhandError(f"'{folder}': {name!r} has shape {whole.shape} where the config says {expected}")
        for expert in range(config.n_experts):
            for number, projection in enumerate(projections):
                rows = slice(number * shape[0], (number + 1) * shape[0])
                separate[f"{name.removesuffix(ending)}.mlp.experts.{expert}.{projection}.weight"] = _Stored(
                    shape, whole.dtype, partial(_rows_of_expert, whole, expert, rows)
                )
    return separate


def _rows_of_expert(whole: _Stored, expert: int, rows: slice) -> "Tensor":
    return whole.read()[expert, rows]


def _without_weights(folder: Path, config: ModelConfig, stored: dict[str, _Stored]) -> "Transformer":
    """The model with shapes but no storage. Raises `ClockhandError` for a size that no file could back."""
    from clockhand.model.transformer import without_weights

    _refuse_countless(folder, config, len(stored))
    try:
        return without_weights(config)
    except (RuntimeError, TypeError, OverflowError):
        raise ClockhandError(f"'{folder}': its config asks for tensors larger than there can be") from None


def _refuse_countless(folder: Path, config: ModelConfig, tensors: int) -> None:
    parts = config.n_layers * max(config.n_experts, 1)
    if parts > tensors:  # a billion layers would fill the memory even without weights
        asked = f"n_layers = {config.n_layers}" + (f" with n_experts = {config.n_experts}" if config.is_moe else "")
        raise ClockhandError(f"'{folder}': its config says {asked}, but only {tensors} tensors are stored")


def _check_names_and_shapes(
    folder: Path, wanted: dict[str, tuple[str, tuple[int, ...]]], stored: dict[str, _Stored]
) -> None:
    """Raises `ClockhandError` unless `stored` is exactly what is `wanted`, which says our name and the shape."""
    found = {
        "missing": [name for name in wanted if name not in stored],
        "surplus": [repr(name) for name in stored if name not in wanted],
        "of another shape": [
            f"{name} {stored[name].shape} instead of {shape}"
            for name, (_, shape) in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    problems = []  # all kinds: a tensor of another name is missing and surplus
    for problem, tensors in found.items():
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        if tensors:
            problems.append(f"{problem}: {', '.join(tensors[:3])}{more}")
    if problems:
        raise ClockhandError(f"'{folder}': tensors {'; '.join(problems)}")


def _read_generation(folder: Path) -> dict[str, Any]:
    """generation_config.json; for an older folder without one, the ids that config.json states."""
    if (folder / folders.GENERATION).is_file():
        return folders.read_json(folder / folders.GENERATION)
    if not (folder / folders.CONFIG).is_file():
        return {}
    config = folders.read_json(folder / folders.CONFIG)
    return {key: config[key] for key in _ID_KEYS if config.get(key) is not None}


# ---- writing ----


def save_model(
    model: "Transformer",
    folder: str | Path,
    tokenizer: "Tokenizer | None" = None,
    tokenizer_files_from: str | Path | None = None,
    dtype: "torch.dtype | None" = None,
    generation: Mapping[str, Any] | None = None,
    card: str = "",
    shard_bytes: int = 5 * 10**9,
) -> Path:
    """Writes a model folder beside its place and moves it there; returns it.

    The tokenizer is an object of ours, or its files are copied as they are from another model's folder, together with
    what that declares for generation. `dtype` (default: as the model is) is fp32, bf16 or fp16. `generation` adds to
    generation_config.json, where `eos_token_id` may be several. `card` is text for the README. Weights of more
    than `shard_bytes` go into several files with an index. An older model in that place is replaced, a folder with
    anything else in it is refused; when something fails, nothing has changed. A packed model (int8, int4) is written
    as it lies in memory, for `load_model` alone to read.
    """
    from clockhand.model.packed import precision_of

    folder = Path(folder)
    precision = precision_of(model)
    is_packed = precision != "fp32"
    if is_packed and (precision not in STORED_PRECISIONS or dtype is not None):
        raise ClockhandError(
            f"a model packed as {precision} is saved as it is, and only as {' or '.join(STORED_PRECISIONS)}"
        )
    if tokenizer is not None and tokenizer.vocab_size > model.config.vocab_size:
        raise ClockhandError(
            f"the tokenizer has {tokenizer.vocab_size} ids, more than vocab_size = {model.config.vocab_size}"
        )
    weights = _packed_weights(model) if is_packed else _weights(model, dtype)
    kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})
    if not is_packed and any(kind not in DTYPES.values() for kind in kinds):
        raise ClockhandError(f"dtype {' and '.join(kinds)} must be one of {', '.join(DTYPES.values())}")
    kind = kinds[0] if len(kinds) == 1 else "float32"
    folders.refuse_foreign(folder)
    with new_folder(folder) as unfinished:
        said: dict[str, Any] = {}
        if tokenizer_files_from is not None:
            _copy_tokenizer(Path(tokenizer_files_from), unfinished)
            said = _read_generation(Path(tokenizer_files_from))
        if tokenizer is not None:
            tokenizer.save(unfinished)
            ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
            said |= {key: id for key, id in zip(_ID_KEYS, ids) if id is not None}
        said |= generation or {}
        config = names.own_words(model.config) if is_packed else names.to_hugging_face(model.config)
        config |= {key: said.get(key) for key in _ID_KEYS}
        if is_packed:
            config[names.WEIGHTS_KEY] = precision
        else:
            config |= dict.fromkeys(("dtype", "torch_dtype"), kind)  # the second is what older readers look for
        _write_json(unfinished / folders.CONFIG, config)
        _write_json(unfinished / folders.GENERATION, said)
        (unfinished / folders.CARD).write_text(_card(model, card), encoding="utf-8")
        _write_weights(weights, unfinished, shard_bytes)
    return folder


def _write_weights(weights: "dict[str, Tensor]", folder: Path, shard_bytes: int) -> None:
    """One file; or, where that would have more than `shard_bytes`, several of at most that (or of one tensor)."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, weight in weights.items():
        if shards[-1] and filled + weight.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = weight
        filled += weight.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = folders.WEIGHTS if len(shards) == 1 else folders.shard_name(number, len(shards))
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(weight.nbytes for weight in weights.values())
        _write_json(folder / folders.INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _weights(model: "Transformer", dtype: "torch.dtype | None") -> "dict[str, Tensor]":
    """What is stored of a model, by the names it has there. Tied weights are stored once."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_embeddings:
            continue
        tensor = _to_half(model.config, name, tensor.detach().cpu())
        weights[_name_there(model.config, name)] = tensor.to(dtype or tensor.dtype).contiguous()
    return weights


def _packed_weights(model: "Transformer") -> "dict[str, Tensor]":
    return {
        name: each.detach().cpu().contiguous()
        for name, each in model.state_dict().items()
        if not _is_tied(model.config, name)
    }


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
    found = [name for name in folders.TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ClockhandError(f"'{source}' holds no tokenizer: none of {', '.join(folders.TOKENIZER_FILES)}")
    for name in found:
        shutil.copyfile(source / name, folder / name)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _card(model: "Transformer", text: str) -> str:
    """The README of a model folder, with the header Hugging Face reads."""
    from clockhand.count import total_parameters
    from clockhand.model.packed import precision_of

    config, family = model.config, names.family_for(model.config)
    total, precision = total_parameters(config), precision_of(model)
    heads = f"{config.n_heads} query and {config.n_kv_heads} KV heads of {config.head_dim}"
    experts = f" × {config.n_experts} experts, {config.n_experts_per_token} a token" if config.is_moe else ""
    how = "    clockhand generate path/to/this/folder"
    if precision != "fp32":
        library, opens = "clockhand", f"Only clockhand opens it: its weights are packed as {precision}."
    elif family is None:
        library, opens = "clockhand", f"Only clockhand opens it: {names.export_obstacle(config)}."
    else:
        library = "transformers"
        opens = f"It is a `{family.architecture}`, which transformers and programs that read its folders open as it is:"
        how = f'    AutoModelForCausalLM.from_pretrained("path/to/this/folder")\n{how}'
        if config.rope_layout == "interleaved":
            how += "\n\nIt was trained with interleaved RoPE; its queries and keys are stored in Hugging Face's order."
    paragraphs = [
        f"---\npipeline_tag: text-generation\nlibrary_name: {library}\n---",
        f"# A Transformer of {total:,} parameters",
        text.strip(),
        f"{config.n_layers} layers of width {config.d_model}, {heads}, MLP width {config.d_ff}{experts}, "
        f"{config.vocab_size} token ids, {config.max_seq_len} positions. Made with clockhand.",
        opens,
        how,
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"
