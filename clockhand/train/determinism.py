"""The same bits from the same seed on the same machine, by order and not by luck (`--deterministic`).

On the CPU our operations add in a fixed order for a given number of threads, with or without this: what remains is that
number, which a run then keeps. On CUDA some kernels add in the order in which their threads come; torch has slower ones
that do not, and refuses what has none.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from clockhand.errors import ClockhandError


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """While the block runs, torch uses deterministic kernels only. Raises `ClockhandError` where there is none."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    # What we read we have written; filling every new tensor first would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise ClockhandError(f"deterministic = True cannot be honoured: {str(error).splitlines()[0]}") from error
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
