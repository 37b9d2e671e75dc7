"""What was forecast of a run before it began, and at its end what became of it: a line for memory, a line for time.

Both compare like with like. Memory is counted from where the run began, without what the process held before. Time is
that of the steps and evaluations this process has made, be the run resumed or stopped early; compiling, checkpoints and
samples are in neither.
"""

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TypeVar

from clockhand.config import ModelConfig
from clockhand.memory import count_peak_from_here, peak_resident_bytes
from clockhand.train.config import TrainConfig
from clockhand.train.plan import Memory, Speed, forecast_memory, forecast_seconds, measure_speed
from clockhand.train.runs import duration

WORTH = 200
"""Steps ahead that make measuring the speed worth it: it costs some five steps and, where blocks are compiled, a second
to trace one for its memory. What is compiled for it the run finds done (LOG.md)."""
Result = TypeVar("Result")


class Reckoning:
    """The forecast of one process's part of a run, from `step` on. Made before the model is, `config` settled."""

    def __init__(self, model: ModelConfig, config: TrainConfig, step: int, timed: bool) -> None:
        """`timed` says whether somebody wants to know the time, for which some steps are tried out."""
        self._config, self._first = config, step
        worth = timed and config.steps - step >= WORTH
        self._speed: Speed | None = measure_speed(model, config) if worth else None
        known = worth or config.compile == "off"
        self._memory: Memory | None = forecast_memory(model, config) if known else None
        import_module("torch._dynamo")  # 80 MB of code that the first optimizer would import: not the run's memory
        self._before = count_peak_from_here()
        self._worked = 0.0

    def timing(self, work: Callable[[], Result]) -> Result:
        """Does `work`, a step or an evaluation."""
        started = time.perf_counter()
        result = work()
        self._worked += time.perf_counter() - started
        return result

    def lines(self, step: int, finished: bool) -> Iterator[str]:
        """For people, when the run stands at `step`; nothing of what is not known."""
        peak = peak_resident_bytes()
        if step - self._first < 2:  # the second step is the first with all that the optimizer remembers
            return
        if self._memory is not None and self._before is not None and peak is not None:
            grown = (peak - self._before) / 1e9
            yield f"memory: grew by {grown:.2f} GB at most; {self._memory.peak / 1e9:.2f} GB were forecast"
        if self._speed is not None:
            seconds = forecast_seconds(self._config, self._speed, self._first, step, finished)
            made = f"{step - self._first:,} steps and their evaluations"
            yield f"time: {made} took {duration(self._worked)}; {duration(seconds)} were forecast"
