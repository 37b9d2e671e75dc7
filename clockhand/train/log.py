"""log.jsonl: one line per step, a JSON object with stable keys.

The line of step s has what was measured of the weights after s updates (`val/...`), and the update that was then made
from them (`train/...`). As both are functions of the step, a run that resumes at step s first drops the lines from s
on and writes them again, the same: no step is there twice, none is missing.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clockhand.disk import write_text
from clockhand.errors import ClockhandError

CLOCKED = ("time", "train/tok_per_s")
"""The keys whose values a clock has measured. All others are functions of configs, data and seed."""


NUMBERS = frozenset(
    {"time", "val/loss", "val/bpb", "train/loss", "train/lr", "train/grad_norm", "train/tokens", "train/tok_per_s"}
)
"""The keys whose values are numbers, or null for one that is none."""


class RunLog:
    def __init__(self, path: Path, step: int) -> None:
        """Opens `path` for a run that stands at `step`: only whole lines of earlier steps are kept."""
        self.path = path
        rows = read_log(path)
        kept = [row for row in rows if row["step"] < step]
        _refuse_lost_lines(path, len(rows), kept[-1]["step"] + 1 if kept else 0, step)
        write_text(path, "".join(_line(row) for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Appends one line, at once visible to whoever reads the file. Raises `ClockhandError` if the disk refuses."""
        with self._refusals():
            self._file.write(_line(row))
            self._file.flush()

    def sync(self) -> None:
        """Returns when all lines would survive a power cut."""
        with self._refusals():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been reported
            self._file.close()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ClockhandError(f"cannot write {self.path}: {error.strerror}; the checkpoints are whole") from error


class NoLog:
    """In place of the log where another process writes it."""

    def write(self, row: dict[str, Any]) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log, up to the first line that is not whole (a process may have died while writing it).

    Raises `ClockhandError` for a line that is whole and yet none that `RunLog` writes: somebody else has.
    """
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line, parse_constant=lambda name: None)  # NaN and Infinity are other programs' null
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise ClockhandError(f"line {number} of {path} has no step; take it out, or move the file away")
        for key in row.keys() & NUMBERS:
            if row[key] is not None and not _is_number(row[key]):
                raise ClockhandError(f"line {number} of {path} has {key} = {row[key]!r}, which is no number")
        rows.append(row)
    return rows


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        raise ClockhandError(f"cannot read {path}: {error.strerror}") from error


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _refuse_lost_lines(path: Path, whole: int, reached: int, step: int) -> None:
    """A run that stands at `step` has brought all lines before it to the disk. One of them that is damaged since would
    take with it those behind it, which are whole: what to do about that is for a person to say."""
    if reached < step and whole < len(_lines(path)):
        raise ClockhandError(
            f"line {whole + 1} of {path} is damaged, and the run stands at step {step}; take it out, or move the file "
            "away"
        )


def _line(row: dict[str, Any]) -> str:
    """JSON has no NaN and no infinity: null stands for both."""
    finite = {key: value for key, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
    plain = {key: finite.get(key) for key in row}
    return json.dumps(plain, ensure_ascii=False) + "\n"
