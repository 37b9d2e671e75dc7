"""Compiled graphs, each compiled once on a machine: kept in the user's cache folder, loaded from there in milliseconds.

    file = graph_file("step", [sources(Step), repr(config)])     everything the graph depends on is in its name
    run = load_or_compile(file, lambda: torch.export.export(...))
    logits, = run([*weights, id])                                 its flat inputs, and its outputs

What is in a graph is settled by those who make it: `step.py` for a token of one text, `chunk.py` for its prompt,
`fused.py` for many texts.
"""

import hashlib
import inspect
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from clockhand.disk import new_file
from clockhand.errors import ClockhandError

Run = Callable[[list[Tensor]], list[Tensor]]

KEPT = 32
"""Graphs that stay in the folder, those used last: 2 to 5 MB each, and a change of code or model makes another."""

_ONE_AT_A_TIME = threading.Lock()
"""Compiling changes settings of the whole process, and two threads would write the same file."""


def cache_folder() -> Path:
    """Where compiled graphs are kept: $CLOCKHAND_CACHE, else clockhand under the user's cache folder."""
    own = os.environ.get("CLOCKHAND_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clockhand"


def compiler() -> str | None:
    """The C++ compiler that inductor would call, or None where there is none."""
    names = [os.environ.get("CXX"), "clang++" if sys.platform == "darwin" else "g++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def graph_file(name: str, parts: Sequence[str]) -> Path:
    """The file of the graph `name` that depends on `parts`."""
    return cache_folder() / f"{name}-{key_of(parts)}.pt2"


def is_kept(file: Path) -> bool:
    """Whether the graph lies there. In a folder that we may not look into none does (`Path.is_file` raises there)."""
    return os.path.isfile(file)


def key_of(parts: Sequence[str]) -> str:
    """A name for what depends on `parts`, and on torch, the CPU, the number of threads and how this file compiles."""
    everything = [
        *parts,
        torch.__version__,
        repr(sorted((name, str(value)) for name, value in torch.cpu.get_capabilities().items())),
        str(torch.get_num_threads()),
        inspect.getsource(sys.modules[__name__]),
    ]
    return hashlib.sha256("\n".join(everything).encode()).hexdigest()[:24]


def sources(*parts: Any) -> str:
    """The code of functions and classes that end up in a graph."""
    return "".join(inspect.getsource(part) for part in parts)


def load_or_compile(
    file: Path, export: Callable[[], torch.export.ExportedProgram], calls: Mapping[Any, list[str]] | None = None
) -> Run:
    """The graph in `file`, or what `export` gives, compiled into it.

    `calls` says for operators of our own which C function the graph calls: its declaration. Who asks has loaded it.

    Raises `ClockhandError` where it has to be compiled and no C++ compiler is found, or it fails, or the file cannot be
    written.
    """
    with _ONE_AT_A_TIME:
        if _is_whole(file):  # a damaged file is made again
            with suppress(RuntimeError):
                return load(file)
        if compiler() is None:
            raise ClockhandError("compiling a step needs a C++ compiler (g++, or the one named in CXX)")
        compile_into(file, export, calls)
        return load(file)


def _is_whole(file: Path) -> bool:
    """Whether the archive is what was written. torch does not look at its checksums, and what it loads is code."""
    try:
        with ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, EOFError, RuntimeError, ValueError, BadZipFile):
        return False


def load(file: Path) -> Run:
    from torch._C._aoti import AOTIModelPackageLoader

    used_now(file)
    with _quiet():  # it warns of other instruction sets, which the file's name already tells apart
        return AOTIModelPackageLoader(str(file), "model", False, 1, -1).run


def used_now(file: Path) -> None:
    """Puts down that it was used, for `forget_unused`."""
    with suppress(OSError):  # in a folder that is only lent to us that cannot be written down
        os.utime(file)


def compile_into(
    file: Path, export: Callable[[], torch.export.ExportedProgram], calls: Mapping[Any, list[str]] | None = None
) -> None:
    import torch._inductor
    import torch._inductor.config as inductor
    from torch._inductor.exc import CppCompileError, InductorError

    # A product and a sum in one instruction; and no check of an index in the middle of a loop: ids are checked before.
    changes: Any = {"cpp.enable_floating_point_contract_flag": "fast", "assert_indirect_indexing": False}
    changes["aot_inductor.custom_ops_to_c_shims"] = dict(calls or {})
    with _quiet(), torch.no_grad(), inductor.patch(changes), _ordered_products(), new_file(file) as unfinished:
        # It insists on the ending .pt2.
        beside = unfinished.with_name(unfinished.name + ".pt2")
        exported = export()
        try:
            torch._inductor.aoti_compile_and_package(exported, package_path=str(beside))
        except (InductorError, CppCompileError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ClockhandError(f"compiling a step with {compiler()} failed: {reason}") from error
        beside.replace(unfinished)
    forget_unused(file.parent)


def forget_unused(folder: Path) -> None:
    """Removes all graphs and libraries of `folder` but the `KEPT` that were used last."""

    def last_used(file: Path) -> float:
        try:
            return file.stat().st_mtime
        except OSError:  # another process was sooner
            return 0.0

    for file in sorted([*folder.glob("*.pt2"), *folder.glob("*.so")], key=last_used, reverse=True)[KEPT:]:
        with suppress(OSError):
            file.unlink()


@contextmanager
def _ordered_products() -> Iterator[None]:
    """While it lasts, inductor takes a product with a matrix in oneDNN's order (and a sum) as the call it is.

    Its own rules accept only weights that are constants of the graph. Ours are inputs, or each model would have a graph
    of its own, with a copy of its weights in the file.
    """
    import torch._inductor.compile_fx  # or the product is not known to it yet
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import lowerings
    from torch._inductor.mkldnn_ir import LinearBinary, LinearUnary

    if not torch.backends.mkldnn.is_available():
        yield
        return
    rules: Any = lowerings
    product = torch.ops.mkldnn._linear_pointwise
    ours = {
        product.default: lambda *inputs: TensorBox.create(LinearUnary.create(*inputs)),
        product.binary: lambda *inputs: TensorBox.create(LinearBinary.create(*inputs)),
    }
    before = {name: rules[name] for name in ours}
    rules.update(ours)
    try:
        yield
    finally:
        rules.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings and log lines of torch's compiler, which are addressed to its authors."""
    import logging
    import warnings

    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
