"""What stands in run folders, read without torch: for `clockhand runs`, and for the last word of a run.

The state is not written down anywhere, where it could be wrong after a kill: a run is running while a process holds its
lock, finished when its log has the last step and its final model is there, and stopped otherwise.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.lock import is_held
from clockhand.presets import PRESETS, VOCAB_FROM_TOKENIZER, build
from clockhand.train.log import read_log
from clockhand.walk import walk

if TYPE_CHECKING:
    from rich.table import Table

CONFIG, LOG, LOCK = "config.json", "log.jsonl", ".lock"


@dataclass(frozen=True)
class Run:
    """One run folder as it is now."""

    folder: str
    preset: str
    """The preset that the model is, `-` where it was changed."""
    state: str
    """running | finished | stopped."""
    step: int
    """Updates made."""
    steps: int
    train_loss: float | None
    """Of the last step."""
    val_loss: float | None
    """Of the last evaluation."""
    best_val_loss: float | None
    best_step: int | None
    tokens: int
    seconds: float
    """That all processes of the run have spent in it."""
    skipped: int
    """Steps that were not applied."""


def find_runs(root: Path, note: Callable[[str], None] = lambda line: None) -> list[Run]:
    """The runs in `root` and in the folders below it, by path. One whose log is damaged is a line to `note`."""
    found = []
    for folder in sorted(_run_folders(root)):
        if read_run_config(folder) is None:  # other programs too keep a config.json beside a log.jsonl
            if has_checkpoints(folder):
                note(f"{folder} is left out: its {CONFIG} is damaged; going on with the run writes it again")
            continue
        try:
            found.append(read_run(folder))
        except ClockhandError as error:
            note(f"{folder} is left out: {error}")
    return found


def _run_folders(root: Path) -> Iterator[Path]:
    for path, folders, files in walk(root):
        if CONFIG in files and LOG in files:
            yield Path(path)
            folders.clear()  # what a run holds are no runs
        folders[:] = [name for name in folders if not name.startswith(".")]


def read_run(folder: Path) -> Run:
    """Raises `ClockhandError` for a log that is none."""
    rows = read_log(folder / LOG)
    config = read_run_config(folder) or {"train": {"steps": 0}, "model": {}}
    steps = config["train"]["steps"]
    evaluated = [row for row in rows if row.get("val/loss") is not None]
    best = min(evaluated, key=lambda row: row["val/loss"], default=None)
    step = rows[-1]["step"] + ("train/loss" in rows[-1]) if rows else 0
    finished = step == steps and (folder / "final" / "model.safetensors").exists()
    return Run(
        folder=str(folder),
        preset=_preset_of(config["model"]),
        state="running" if is_held(folder / LOCK) else "finished" if finished else "stopped",
        step=step,
        steps=steps,
        train_loss=_last(rows, "train/loss"),
        val_loss=_last(rows, "val/loss"),
        best_val_loss=None if best is None else best["val/loss"],
        best_step=None if best is None else best["step"],
        tokens=_last(rows, "train/tokens") or 0,
        seconds=_last(rows, "time") or 0.0,
        skipped=sum(row.get("train/skipped") is True for row in rows),
    )


def read_run_config(folder: Path) -> dict[str, Any] | None:
    """The config.json of a run folder: `model` and `train` are dicts, and `train` has `steps`. None where none is."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    model, train = config.get("model"), config.get("train")
    ours = isinstance(model, dict) and isinstance(train, dict) and type(train.get("steps")) is int
    return config if ours else None


def has_checkpoints(folder: Path) -> bool:
    """Whether a run has saved there."""
    return any((folder / "checkpoints").glob("step-*/training.json"))


def _last(rows: list[dict[str, Any]], key: str) -> Any:
    return next((row[key] for row in reversed(rows) if key in row), None)


def _preset_of(model: dict[str, Any]) -> str:
    for name in PRESETS:
        free = {"vocab_size": model.get("vocab_size")} if name in VOCAB_FROM_TOKENIZER else {}
        try:
            if build(name, **free) == ModelConfig(**model):
                return name
        except (TypeError, ClockhandError):  # of another version, or none of ours
            return "-"
    return "-"


SPARE = ("train", "preset", "validation", "time")
"""Columns of the list that go, in this order, where a terminal is too narrow for all."""


def runs_table(runs: list[Run], width: int | None) -> "tuple[Table, list[str]]":
    """The list of `clockhand runs`, a line for each run, and the names of the columns it had no room for.

    `width` is the terminal's, in characters; None (a pipe) leaves nothing out.
    """
    from rich.cells import cell_len
    from rich.table import Table

    columns = {
        "run": [run.folder for run in runs],
        "preset": [run.preset for run in runs],
        "state": [run.state for run in runs],
        "step": [f"{run.step:,}/{run.steps:,}" for run in runs],
        "train": [_loss(run.train_loss) for run in runs],
        "validation": [_loss(run.val_loss) for run in runs],
        "best": [
            _loss(run.best_val_loss) + (f" at {run.best_step:,}" if run.best_step is not None else "") for run in runs
        ],
        "time": [duration(run.seconds) for run in runs],
    }
    left_out: list[str] = []

    def needed() -> int:
        return sum(max(map(cell_len, [title, *cells])) + len("  ") for title, cells in columns.items()) - len("  ")

    for title in SPARE:
        if width is not None and needed() > width:
            del columns[title]
            left_out.append(title)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in columns:
        # A run's name is whole even where it alone is wider than the terminal, which then breaks it as it likes.
        table.add_column(title, justify="left" if title in ("run", "preset", "state") else "right", no_wrap=True)
    for cells in zip(*columns.values()):
        table.add_row(*cells)
    table.width = needed()
    return table, left_out


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def summary(run: Run) -> str:
    """The last word of a run that ended well: what it took, and where it was best."""
    speed = f", {run.tokens / run.seconds:,.0f} tokens a second" if run.seconds else ""
    text = f"{run.step:,} step{'s' * (run.step != 1)}, {run.tokens:,} tokens in {duration(run.seconds)}{speed}"
    if run.skipped:
        text += f"; {run.skipped} step{'s' * (run.skipped != 1)} not applied"
    if run.best_val_loss is not None and run.best_step != run.step:
        kept = f" ({Path(run.folder) / 'best'})" if (Path(run.folder) / "best").is_dir() else ""
        text += f"\nbest validation loss {run.best_val_loss:.4f} at step {run.best_step:,}{kept}"
    return text


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
