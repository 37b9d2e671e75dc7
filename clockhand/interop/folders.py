"""The folders of models and runs: finding them, reading their JSON with care, and what may be replaced.

A model folder holds a config.json and weights: model.safetensors, or several files named in
model.safetensors.index.json. A run folder holds models, of which `find_model_folder` picks the one meant.

Nothing here imports torch or knows what a config says; see `hf.py`.
"""

import json
import re
from pathlib import Path
from typing import Any

from clockhand.errors import ClockhandError

CONFIG, GENERATION, WEIGHTS, INDEX = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
CARD = "README.md"
OWN_FILES = frozenset({CONFIG, GENERATION, WEIGHTS, INDEX, CARD, "parity.json", *TOKENIZER_FILES})
"""What a folder may hold, beside shards, for us to write another model in its place."""

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

_LONGEST_JSON = 64 * 2**20  # the index of a model of 100,000 tensors is a tenth of this


def find_model_folder(path: str | Path) -> Path:
    """The model folder that `path` means: itself, or for a run folder its final/, else its newest whole checkpoint.

    Raises `ClockhandError` that says what was found instead.
    """
    if path == "":  # which Path takes for the current folder
        raise ClockhandError("the name of a model folder or a run folder is needed, not ''")
    path = Path(path)
    if not path.exists():
        raise ClockhandError(f"'{path}' does not exist; a model folder or a run folder is needed")
    if not path.is_dir():
        raise ClockhandError(f"'{path}' is a file; a model folder ({CONFIG} and {WEIGHTS}) is needed")
    for folder in (path, path / "final"):
        if is_model_folder(folder):
            return folder
    checkpoints = [folder for folder in (path / "checkpoints").glob("step-*") if folder.name[5:].isdecimal()]
    checkpoints.sort(key=lambda folder: int(folder.name[5:]), reverse=True)
    for folder in checkpoints:
        if is_model_folder(folder) and all(map(_opens, weight_files(folder))):
            return folder
    if checkpoints:
        raise ClockhandError(f"none of the {len(checkpoints)} checkpoints in '{path}' is whole")
    names = sorted(entry.name for entry in path.iterdir())
    found = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"
    raise ClockhandError(
        f"'{path}' is neither a model folder ({CONFIG} and {WEIGHTS}) nor a run folder with a model in it; "
        f"it holds {found}"
    )


def is_model_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and ((folder / WEIGHTS).is_file() or (folder / INDEX).is_file())


def shard_name(number: int, count: int) -> str:
    """The file of shard `number` (from 1) of `count`."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, which may be several. They exist; nothing more is said of them."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ClockhandError(f"'{folder}' holds no weights: neither {WEIGHTS} nor {INDEX}")
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(name, str) for name in where.values()):
        raise ClockhandError(f"{folder / INDEX} must have a 'weight_map' from tensors to files")
    files = []
    for name in sorted(set(where.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise ClockhandError(f"{folder / INDEX} names the file {name!r}; only a .safetensors beside it is read")
        if not (folder / name).is_file():
            raise ClockhandError(f"{folder / name} is missing, though {INDEX} names it")
        files.append(folder / name)
    return files


def _opens(file: Path) -> bool:
    """Whether a safetensors file is whole, judged by its header and its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False


def unreadable(file: Path, error: Exception) -> ClockhandError:
    """The refusal of a file that the safetensors library could not open."""
    reason, size = " ".join(str(error).split()), file.stat().st_size
    return ClockhandError(f"{file} ({size:,} bytes) is no whole safetensors file: {reason}; it may be cut short")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ClockhandError` for anything else, and for a file no config could need."""
    try:
        size = file.stat().st_size
        content = json.loads(file.read_text("utf-8")) if size <= _LONGEST_JSON else None
    except (ValueError, RecursionError, OSError) as error:
        raise ClockhandError(f"{file} is not readable JSON: {error}") from None
    if size > _LONGEST_JSON:
        raise ClockhandError(f"{file} has {size:,} bytes, where a few thousand are usual")
    if not isinstance(content, dict):
        raise ClockhandError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def refuse_foreign(folder: Path) -> None:
    """Raises `ClockhandError` where a model must not be written: over anything that is no older model."""
    if folder.exists() and not folder.is_dir():
        raise ClockhandError(f"'{folder}' is a file; a model is written as a folder")
    held = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in held if name not in OWN_FILES and not _SHARD.fullmatch(name)]
    if foreign:
        raise ClockhandError(f"'{folder}' holds {foreign[0]}, which is no part of a model; give a new folder")
    if held and not is_model_folder(folder):
        raise ClockhandError(f"'{folder}' exists and is not a model folder; it holds {', '.join(held)}")
