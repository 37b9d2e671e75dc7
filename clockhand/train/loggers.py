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


class WithLogger(Reporter):
    """A reporter, and a logger that hears the same.

    A logger that does not start is refused, as somebody has asked for it. One that fails later is told of and left
    alone: the run costs more than its picture, and the numbers are in log.jsonl. What other people's code may raise
    nobody knows, so it is any exception.
    """

    def __init__(self, reporter: Reporter, logger: Reporter, name: str) -> None:
        self._reporter, self._logger, self._name = reporter, logger, name
        self._hears = False

    def start(self, step: int, steps: int) -> None:
        try:
            self._logger.start(step, steps)
        except Exception as error:
            raise ClockhandError(f"--logger {self._name} does not start: {_in_a_line(error)}") from error
        self._hears = True
        self._reporter.start(step, steps)

    def row(self, row: dict[str, Any]) -> None:
        self._reporter.row(row)
        self._tell(lambda: self._logger.row(row))

    def note(self, line: str) -> None:
        self._reporter.note(line)

    def stop(self) -> None:
        self._reporter.stop()
        self._tell(self._logger.stop)

    def _tell(self, what: Callable[[], None]) -> None:
        if not self._hears:
            return
        try:
            what()
        except Exception as error:
            self._hears = False
            self.note(f"--logger {self._name} has failed and hears no more: {_in_a_line(error)}")


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
        # Its own count of steps never goes back: what a resumed run repeats would be dropped.
        self._run.define_metric("*", step_metric="step")

    def row(self, row: dict[str, Any]) -> None:
        text = {"sample": row["sample"]} if "sample" in row else {}
        self._run.log({"step": row["step"], **numbers_of(row), **text})

    def stop(self) -> None:
        self._run.finish()


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


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

            return WithLogger(reporter, TensorBoardReporter(SummaryWriter, out), logger)
        import wandb

        return WithLogger(reporter, WandbReporter(wandb, out), logger)
    except ImportError:
        raise ClockhandError(f"--logger {logger} needs a package that is not installed: pip install {logger}") from None
