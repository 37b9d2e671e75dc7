"""C++ functions are compiled once, and where they cannot be had nothing breaks."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from clockhand.infer import native as module
from clockhand.infer.attend_rows import _operator as attend_operator
from clockhand.infer.graphs import cache_folder
from clockhand.infer.native import CALLS, native
from clockhand.infer.ordered import ordered_product

needs_native = pytest.mark.skipif(native() is None, reason="needs a C++ compiler, AVX-512 and bf16")


@needs_native
def test_without_a_compiler_a_place_to_write_or_the_instructions_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path / "cache"))
    for program in (None, "false", str(tmp_path / "no such program")):
        monkeypatch.setattr(module, "compiler", lambda program=program: program)
        assert native.__wrapped__() is None
        assert list(tmp_path.glob("cache/*")) == []
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path / "file"))
    assert native.__wrapped__() is None
    monkeypatch.undo()
    assert native.__wrapped__() is not None  # control
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    assert native.__wrapped__() is None


@needs_native
def test_what_is_compiled_is_compiled_once(monkeypatch):
    def never(*ignored, **too):
        raise AssertionError("compiled again")

    monkeypatch.setattr(module.subprocess, "run", never)
    assert native.__wrapped__() is not None


@needs_native
def test_operators_are_well_formed_and_each_has_its_c_function():
    matrix, x = torch.randn(40, 16), torch.randn(3, 16)
    torch.library.opcheck(ordered_product, (x, matrix))
    q, memory, slots = torch.randn(3, 4, 8), torch.randn(5, 6, 2, 8), torch.tensor([4, 0, 2])
    torch.library.opcheck(attend_operator, (q, memory, memory.clone(), slots, torch.zeros(3, 6)))
    for (declaration,) in CALLS.values():
        name = declaration.split()[1].split("(")[0]
        assert getattr(native(), name)


@needs_native
def test_a_damaged_library_is_made_again(monkeypatch, tmp_path):
    """It was loaded as it was: cut short it killed the process at once, with a hole when a function was called."""
    (whole,) = cache_folder().glob("native-*.so")
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    library, content = tmp_path / whole.name, whole.read_bytes()
    made = []
    monkeypatch.setattr(module, "_compile", lambda files, to: made.append(to) or bool(to.write_bytes(content)))
    for damaged in (b"", b"junk", content[: len(content) // 3], content[:9000] + bytes(2000) + content[11000:]):
        library.unlink(missing_ok=True)  # one that is loaded must not change
        library.write_bytes(damaged)
        assert native.__wrapped__() is not None
        assert made == [library]
        assert library.read_bytes() == content
        made.clear()
    assert native.__wrapped__() is not None  # control
    assert made == []


@needs_native
def test_where_a_library_cannot_be_loaded_there_is_none(monkeypatch):
    def refuse(*ignored, **too):
        raise OSError("failed to map segment from shared object")  # the folder is mounted with noexec

    monkeypatch.setattr(module.ctypes, "CDLL", refuse)
    assert native.__wrapped__() is None


@needs_native
def test_threads_that_want_it_at_the_same_time_compile_it_once(monkeypatch, tmp_path):
    """They wrote the same unfinished file, and who came second went on without."""
    (whole,) = cache_folder().glob("native-*.so")
    content, made = whole.read_bytes(), []
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))

    def compile(files, library):
        made.append(library)
        time.sleep(0.05)  # for the others to come
        return bool(library.write_bytes(content))

    monkeypatch.setattr(module, "_compile", compile)
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: native.__wrapped__(), range(4)))
    assert None not in libraries
    assert made == [tmp_path / whole.name]
