"""When a step is not to be trusted: a loss or a gradient that is no number, or far outside its recent history.

    trouble   loss or gradient norm not finite
              or, among the last 64 steps, more than twice their median and further above it than 10 deviations

The deviation is the median distance from the median, times 1.4826: for a normal distribution that is σ, and a spike in
the history does not widen it. Twice the median is asked for as well because a late, quiet stretch of a run has a
deviation of almost nothing.

The history is what log.jsonl holds of earlier steps, so a run that resumes judges as the uninterrupted one would have.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

WINDOW = 64
FEWEST = 16
"""Steps without which nothing is called usual."""
DEVIATIONS, TIMES = 10.0, 2.0
SIGMA = 1.4826  # of a normal distribution, in median distances from its median

MEASURED = {"train/loss": "loss", "train/grad_norm": "gradient norm"}


class History:
    """What the last steps of a run were like."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """`rows` of log.jsonl, in their order."""
        self._values: dict[str, deque[float]] = {key: deque(maxlen=WINDOW) for key in MEASURED}
        self.skipped_in_a_row = 0
        self._last_trouble: int | None = None
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Remembers the row of a step that is over. One that learned nothing says nothing of what is usual."""
        if "train/loss" not in row:
            return
        for key, values in self._values.items():
            value = row.get(key)
            if value is not None and math.isfinite(value) and row.get("train/grad_norm") != 0:
                values.append(value)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if row.get("train/skipped") else 0
        if "train/trouble" in row:
            self._last_trouble = row["step"]

    def trouble(self, loss: float, norm: float) -> str:
        """What is wrong with a step, in words; empty when nothing is."""
        for (key, word), value in zip(MEASURED.items(), (loss, norm)):
            if not math.isfinite(value):
                return f"{word} {value}"
            values = self._values[key]
            if len(values) < FEWEST:
                continue
            usual = median(values)
            deviation = SIGMA * median(abs(each - usual) for each in values)
            if value > TIMES * usual and value > usual + DEVIATIONS * deviation:
                return f"{word} {value:.4g}, usually {usual:.4g}"
        return ""

    def is_first(self, step: int) -> bool:
        """Whether trouble at `step` is not the continuation of an earlier one, and worth keeping."""
        return self._last_trouble is None or step - self._last_trouble > WINDOW
