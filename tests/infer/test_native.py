"""C++ functions are compiled once, and where they cannot be had nothing breaks."""

import pytest
import torch

from clockhand.infer import native as module
from clockhand.infer.attend_rows import _operator as attend_operator
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
