"""Checkpoints: whole or absent, verified when read, and openable as a model like any other folder.

    checkpoints/step-00001000/
      config.json model.safetensors tokenizer.json ...   a model folder
      training.safetensors                               what the optimizer remembers
      training.json                                      step, configs, and size and SHA-256 of every other file

    best/                                                the same without training.safetensors: the weights with the
                                                         lowest validation loss, which `remove_old` never touches

The randomness and the order of the data are functions of the seed and the step, so no generator needs to be stored.

How a folder appears whole or not at all is in `disk.py`. Nothing here is a pickle.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from clockhand.data.tokenizer import Tokenizer
from clockhand.disk import new_folder
from clockhand.errors import ClockhandError
from clockhand.interop.hf import load_model, save_model
from clockhand.model.transformer import Transformer
from clockhand.train.optim import Optimizer, load_optimizer_tensors
from clockhand.train.parallel import put

STATE_FILE, TENSORS_FILE = "training.json", "training.safetensors"
BEST = "best"
"""The folder of the best weights: whatever step they are of."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]
    """What `training.json` holds."""

    @property
    def step(self) -> int:
        return self.state["step"]


def save_checkpoint(
    root: Path, model: Transformer, memory: dict[str, Tensor], tokenizer: Tokenizer, state: dict[str, Any]
) -> Path:
    """Writes `root/step-...` with everything a run needs to go on; returns that folder.

    `memory` is what the optimizer remembers (`optimizer_tensors`); `state` holds the plain values, `step` among them.
    Raises `ClockhandError` when the disk refuses; what was there before is untouched then, and nothing half-written
    stays.
    """
    folder = root / f"step-{state['step']:08d}"
    with new_folder(folder) as unfinished:
        save_model(model, unfinished, tokenizer)
        save_file(memory, unfinished / TENSORS_FILE)
        _write_state(unfinished, state)
    return folder


def save_best(folder: Path, model: Transformer, tokenizer: Tokenizer, state: dict[str, Any]) -> None:
    """Writes `folder` in place of the best one so far; `state` has step and val_loss. Raises as `save_checkpoint`."""
    with new_folder(folder) as unfinished:
        save_model(model, unfinished, tokenizer)
        _write_state(unfinished, state)


def best_loss(folder: Path) -> float:
    """The validation loss of the weights in `folder`; infinite where there are none, or they are not whole."""
    try:
        loss = open_checkpoint(folder).state["val_loss"]
    except (ClockhandError, KeyError):
        return math.inf
    return loss if isinstance(loss, float) else math.inf


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    files = {path.name: _size_and_hash(path) for path in sorted(folder.iterdir())}
    (folder / STATE_FILE).write_text(json.dumps({**state, "files": files}, indent=2) + "\n", encoding="utf-8")


def newest_checkpoint(root: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint under `root`, or None. One that is not whole is skipped with a line to `warn`."""
    for folder in reversed(_folders(root)):
        try:
            return open_checkpoint(folder)
        except ClockhandError as error:
            warn(f"{error}; skipping this checkpoint")
    return None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Reads `training.json` and verifies every file it names. Raises `ClockhandError` naming the first wrong file."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        files, step = state["files"], state["step"]
        whole = all(type(file["size"]) is int and isinstance(file["sha256"], str) for file in files.values())
        whole = whole and all(isinstance(state[section], dict) for section in ("model", "train", "data"))
        whole = whole and isinstance(state["data"]["sha256"], str) and math.isfinite(state["seconds"])
        whole = whole and any(name.startswith("model") for name in files)  # its weights, in one file or several
        whole = whole and (folder.name == BEST or TENSORS_FILE in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        whole = False
    if not whole:
        raise ClockhandError(f"{folder / STATE_FILE} is missing or damaged")
    if type(step) is not int or (folder.name != BEST and step != _step_of(folder)):
        raise ClockhandError(f"{folder / STATE_FILE} has step = {step!r}, which is not that of its folder")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise ClockhandError(f"{path} is missing")
        if path.stat().st_size != expected["size"]:
            size = path.stat().st_size
            raise ClockhandError(f"{path} has {size} bytes, not the {expected['size']} it was saved with")
        if _size_and_hash(path) != expected:
            raise ClockhandError(f"{path} is damaged: its SHA-256 is not the one it was saved with")
    return Checkpoint(folder, state)


def restore(checkpoint: Checkpoint, model: Transformer, optimizer: Optimizer) -> None:
    """Puts the weights and the optimizer's memory of a verified checkpoint in place."""
    saved = dict(load_model(checkpoint.folder).named_parameters())
    for name, parameter in model.named_parameters():
        put(parameter, saved[name])
    load_optimizer_tensors(model, optimizer, load_file(checkpoint.folder / TENSORS_FILE))


def remove_old(root: Path, keep_last: int, step: int, warn: Callable[[str], None]) -> None:
    """Keeps the last `keep_last` checkpoints up to `step` (0 keeps all).

    One that cannot be removed is a line to `warn`. One beyond `step` is a damaged one that was skipped: it does not
    count, or it might push out a whole one.
    """
    reached = [folder for folder in _folders(root) if _step_of(folder) <= step]
    for folder in reached[:-keep_last] if keep_last else []:
        try:
            shutil.rmtree(folder)
        except OSError as error:  # no reason to stop a run that can still save
            warn(f"cannot remove {folder}: {error.strerror}; it stays")


def _folders(root: Path) -> list[Path]:
    """The checkpoint folders under `root`, oldest step first."""
    return sorted((path for path in root.glob("step-*") if _step_of(path) >= 0), key=_step_of)


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else -1


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": digest}
