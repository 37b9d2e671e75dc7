"""How fast this machine multiplies matrices, found out in milliseconds whatever it is.

A processor without bf16 instructions multiplies bf16 by emulation, some 200 times slower than fp32. So a probe begins
with a product that takes a millisecond even there, and grows only as long as the next one fits its time.
"""

import time
from collections.abc import Callable

import torch

LIMIT = 0.05
"""Seconds that a probe takes, about."""
REPEATS = 5


def matmul_flops(dtype: torch.dtype, device: torch.device | str = "cpu", largest: int = 1024) -> float:
    """FLOP/s of a product of two square matrices of up to `largest` rows: the best seen at the largest size tried.

    A multiplication and an addition are two operations.
    """
    device = torch.device(device)
    started, size, speed = time.perf_counter(), 64, 0.0
    while True:
        a, b = torch.ones(2, size, size, dtype=dtype, device=device)
        best = _best(lambda a=a, b=b: a @ b, device, started + LIMIT)  # type: ignore[misc]
        speed = 2 * size**3 / best
        size = min(2 * size, largest)
        if a.shape[0] == largest or time.perf_counter() - started + 2 * size**3 / speed > LIMIT:
            return speed


def _best(work: Callable[[], object], device: torch.device, until: float) -> float:
    """The least of `REPEATS` times, or of as many as begin before `until`: what is busy beside it can only slow."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        best = min(best, ended - started)
        if ended > until:
            break
    return best
