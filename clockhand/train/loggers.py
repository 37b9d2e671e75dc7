"""The rows of a run, sent on to a program that draws them: TensorBoard or Weights & Biases, where one is installed.

They are reporters like any other: log.jsonl stays what counts, and a run that resumes writes the repeated steps again
in the place of the first ones.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clockhand.errors import ClockhandError
from clockhand.train.progress import Reporter

LOGGERS = ("none", "tensorboard", "wandb")


class Several(Reporter):
    """Tells each of them."""

    def __init__(self, *reporters: Reporter) -> None:
        self._reporters = reporters

    def start(self, step: int, steps: int) -> None:
        for each in self._reporters:
            each.start(step, steps)

    def row(self, row: dict[str, Any]) -> None:
        for each in self._reporters:
            each.row(row)

    def note(self, line: str) -> None:
        for each in self._reporters:
            each.note(line)

    def stop(self) -> None:
        for each in self._reporters:
            each.stop()


class TensorBoardReporter(Reporter):
    """Event files in `out`/tensorboard."""

    def __init__(self, writer: Callable[..., Any], out: Path) -> None:
        self._make, self._out = writer, out
        self._writer: Any = None

    def start(self, step: int, steps: int) -> None:
        self._writer = self._make(str(self._out / "tensorboard"), purge_step=step)

    def row(self, row: dict[str, Any]) -> None:
        for key, value in numbers_of(row).items():
            self._writer.add_scalar(key, value, row["step"])
        if "sample" in row:
            self._writer.add_text("sample", row["sample"], row["step"])

    def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbReporter(Reporter):
    """A run of the project `clockhand`, whose id follows from the place of the run folder."""

    def __init__(self, wandb: Any, out: Path) -> None:
        self._wandb, self._out = wandb, out
        self._run: Any = None

    def start(self, step: int, steps: int) -> None:
        place = hashlib.sha256(str(self._out.resolve()).encode()).hexdigest()[:16]
        self._run = self._wandb.init(
            project="clockhand", name=self._out.name, id=place, resume="allow", dir=str(self._out)
        )

    def row(self, row: dict[str, Any]) -> None:
        text = {"sample": row["sample"]} if "sample" in row else {}
        self._run.log({**numbers_of(row), **text}, step=row["step"])

    def stop(self) -> None:
        if self._run is not None:
            self._run.finish()


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """What of a row can be drawn."""
    return {key: value for key, value in row.items() if key != "step" and type(value) in (int, float, bool)}


def with_logger(reporter: Reporter, logger: str, out: Path) -> Reporter:
    """`reporter`, and the `logger` beside it. Raises `ClockhandError` for one that is not there."""
    if logger not in LOGGERS:
        raise ClockhandError(f"--logger {logger} must be {' | '.join(LOGGERS)}")
    if logger == "none":
        return reporter
    try:
        if logger == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return Several(reporter, TensorBoardReporter(SummaryWriter, out))
        import wandb

        return Several(reporter, WandbReporter(wandb, out))
    except ImportError:
        raise ClockhandError(f"--logger {logger} needs a package that is not installed: pip install {logger}") from None
