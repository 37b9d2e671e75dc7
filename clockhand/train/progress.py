"""What a person sees of a training run: a bar on a terminal, plain lines anywhere else, all of it on stderr.

The loop tells a `Reporter` what happened and knows nothing of how it looks. A row is a line of log.jsonl.
"""

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clockhand.train.runs import duration

SECONDS_BETWEEN_LINES = 10.0
FIRST_STEPS = 2
"""These compile, and wait for what is loaded at first use: they say nothing about how long the others will take."""


class Reporter:
    """Says nothing. The others say more."""

    def start(self, step: int, steps: int) -> None:
        """The run stands at `step` of `steps`."""

    def row(self, row: dict[str, Any]) -> None:
        """The line of one step, as it is written to log.jsonl."""

    def note(self, line: str) -> None:
        """Anything else worth a line."""

    def stop(self) -> None:
        """The run has ended, well or not."""


class LineReporter(Reporter):
    """A line for every evaluation, and one every few seconds between them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def start(self, step: int, steps: int) -> None:
        self._first, self._steps = step, steps
        self._started = self._last_line = time.monotonic()

    def row(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if row["step"] - self._first == FIRST_STEPS:
            self._started = now
        if "val/loss" in row or "sample" in row or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            done = row["step"] - self._first - FIRST_STEPS
            left = (now - self._started) / done * (self._steps - row["step"]) if done > 0 else None
            ending = "" if left is None else f"  {duration(left)} left"
            self._print(f"step {row['step']}/{self._steps}  {describe(row)}{ending}")
        if "sample" in row:
            self._print(indented(row["sample"]))

    def note(self, line: str) -> None:
        self._print(line)

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class BarReporter(Reporter):
    """A bar that stays at the bottom, with evaluations and samples going by above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")]
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console)

    def start(self, step: int, steps: int) -> None:
        self._task = self._progress.add_task("", total=steps, completed=step)
        self._progress.start()

    def row(self, row: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=row["step"])
        if "train/loss" in row:
            self._progress.update(self._task, description=describe(row, ("train/loss", "train/tok_per_s")))
        if "val/loss" in row:
            self._print(f"step {row['step']}  {describe(row, ('val/loss', 'val/bpb'))}")
        if "sample" in row:
            self._print(indented(row["sample"]))

    def note(self, line: str) -> None:
        self._print(line)

    def stop(self) -> None:
        self._progress.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)


def make_reporter() -> Reporter:
    """The one that suits stderr."""
    console = Console(stderr=True)
    return BarReporter(console) if console.is_terminal else LineReporter()


FORMATS = {
    "val/loss": "validation loss {:.4f}",
    "val/bpb": "{:.3f} bits/byte",
    "train/loss": "loss {:.4f}",
    "train/balance_loss": "balance {:.5f}",
    "train/lr": "lr {:.2e}",
    "train/tok_per_s": "{:,.0f} tok/s",
}


def describe(row: dict[str, Any], keys: tuple[str, ...] = tuple(FORMATS)) -> str:
    """The numbers of a row in words, those of `keys` that it has."""
    return "  ".join(FORMATS[key].format(row[key]) for key in keys if key in row)


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
