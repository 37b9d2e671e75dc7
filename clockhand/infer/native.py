"""Functions in C++, for what torch has no fast way to do: compiled when first needed, kept beside the compiled graphs.

`attend_rows.cpp` and `ordered.cpp` are written for processors with AVX-512 that multiply bf16 (AMD from Zen 4 on,
Intel from Cooper Lake on). Who uses one has another way for all other machines, and a test that both are equal.

A file has each function twice: plainly, for Python (`ctypes`), and as inductor calls an operator of ours, so that a
compiled graph calls it without Python.
"""

import ctypes
import hashlib
import inspect
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clockhand.disk import new_file
from clockhand.errors import ClockhandError
from clockhand.infer.graphs import cache_folder, compiler, forget_unused, key_of, used_now

FILES = ("ordered.cpp", "attend_rows.cpp")


@cache
def native() -> ctypes.CDLL | None:
    """The library of them. None where it cannot be had, or where oneDNN has better instructions than it uses (AMX)."""
    able = torch.cpu.get_capabilities()
    wanted = all(able.get(name) for name in ("avx512_f", "avx512_bw", "avx512_vl", "avx512_bf16"))
    if not sys.platform.startswith("linux") or not wanted or able.get("amx_tile"):
        return None
    files = [Path(__file__).with_name(name) for name in FILES]
    library = cache_folder() / f"native-{key_of([file.read_text() for file in files])}.so"
    with _ONE_AT_A_TIME:
        if not _is_whole(library) and not _compile(files, library):
            return None
    used_now(library)
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # so that the graphs find it
    except OSError:  # in a folder from which nothing may be run
        return None


_ONE_AT_A_TIME = threading.Lock()
"""Two threads would write the same file."""


def _is_whole(library: Path) -> bool:
    """Whether it ends with the digest that `_compile` gave it. Loading a damaged one would kill the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-DIGEST:] == _digest(content[:-DIGEST])


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


DIGEST = 32
"""Bytes at the end of a library, which whoever loads it does not look at."""


def _compile(files: list[Path], library: Path) -> bool:
    """Whether it could: not without a compiler, with an old one, or with nowhere to write."""
    if (program := compiler()) is None:
        return False
    own = Path(torch.__file__).parent
    how = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{own / 'include'}"]
    try:
        with new_file(library) as unfinished:
            command = [program, *how, *map(str, files), f"-L{own / 'lib'}", "-ltorch_cpu", "-o", str(unfinished)]
            subprocess.run(command, capture_output=True, check=True)
            unfinished.write_bytes((content := unfinished.read_bytes()) + _digest(content))
    except (ClockhandError, OSError, subprocess.CalledProcessError):
        return False
    forget_unused(library.parent)
    return True


def call(name: str, tensors: list[Tensor], sizes: list[int], bf16: bool) -> None:
    """The function `name` of `native`, whose last tensor is what it writes to."""
    library = native()
    assert library is not None
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in tensors]
    getattr(library, name)(*pointers, *map(ctypes.c_int64, sizes), bf16)


CALLS: dict[Any, list[str]] = {}
"""For our operators, the declarations of what a compiled graph calls instead (see `load_or_compile`)."""


def operator(name: str, run: Callable[..., Tensor], describe: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run`, which calls the function `name` with tensors alone, as an operator that can be part of a graph.

    `describe` gives an empty tensor of the shape of the result.
    """
    made = torch.library.custom_op(f"clockhand::{name}", run, mutates_args=(), device_types="cpu")
    made.register_fake(describe)
    inputs = "AtenTensorHandle, " * len(inspect.signature(run).parameters)
    CALLS[getattr(torch.ops.clockhand, name).default] = [
        f"AOTITorchError aoti_torch_cpu_{name}({inputs}AtenTensorHandle*)"
    ]
    return made
