"""Memory of this machine and of this process: whether a model fits, told before it is built, and what was used."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from clockhand.config import ModelConfig
from clockhand.count import total_parameters
from clockhand.errors import ClockhandError

TRAINING_BYTES = 16
"""Of one parameter in training: the weight, its gradient and AdamW's two moments, all fp32. Activations come on top."""
FP32 = 4


def total_memory() -> int | None:
    """Bytes of memory that this machine, or the container one is in, has in all. None where nobody says."""
    found = []
    with suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with suppress(OSError, ValueError):  # "max" is no number: no limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found, default=None)


def refuse_beyond_memory(config: ModelConfig, rows: int = 0, seq_len: int = 0) -> None:
    """Raises `ClockhandError` for a model whose training cannot fit: whatever the batch, or in micro-batches of `rows`
    of `seq_len` tokens. Beside weights and what the optimizer remembers at least the inputs of all blocks are there.
    """
    needed, there = total_parameters(config) * TRAINING_BYTES, total_memory()
    if there is not None and needed > there:
        raise ClockhandError(
            f"a model of {total_parameters(config):,} parameters needs {needed / 2**30:,.1f} GiB to train "
            f"({TRAINING_BYTES} bytes each), and this machine has {there / 2**30:,.1f}; take a smaller preset, "
            "fewer n_layers or a smaller d_model"
        )
    inputs = rows * seq_len * config.d_model * FP32 * config.n_layers
    needed = inputs + total_parameters(config) * (TRAINING_BYTES - FP32)  # gradients come when activations go
    if there is not None and needed > there:
        raise ClockhandError(
            f"batch_size = {rows} rows of seq_len = {seq_len} need more than {needed / 2**30:,.1f} GiB to train, and "
            f"this machine has {there / 2**30:,.1f}; take fewer, and accumulate more (--fit-memory does)"
        )


def count_peak_from_here() -> int | None:
    """Forgets how much memory the process once held, gives back what it does not use, and tells the bytes it holds.

    None where Linux's /proc does not let us.
    """
    with suppress(OSError, AttributeError):  # AttributeError: not glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")


def peak_resident_bytes() -> int | None:
    """The most memory this process has held since `count_peak_from_here`, or ever; None where /proc does not say."""
    return _resident("VmHWM")


def _resident(which: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{which}:"):
                return int(line.split()[1]) * 1024
    return None
