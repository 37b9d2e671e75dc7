"""The folder of compiled graphs."""

import inspect
import os
from types import CodeType
from zipfile import ZipFile

import pytest

from clockhand.errors import ClockhandError
from clockhand.infer import chunk, fused, graphs, step


def test_of_many_graphs_those_used_last_stay_and_nothing_else_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2)
    for age, name in enumerate(["new.pt2", "middle.so", "old.pt2", "older.so", "older.txt"]):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    graphs.forget_unused(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"new.pt2", "middle.so", "older.txt"}


def test_loading_a_graph_counts_as_using_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._C._aoti.AOTIModelPackageLoader", lambda *ignored: type("Loader", (), {"run": None}))
    file = tmp_path / "step.pt2"
    file.write_text("")
    os.utime(file, (1000, 1000))
    graphs.load(file)
    assert file.stat().st_mtime > 1000


def test_in_a_folder_that_may_not_be_looked_into_no_graph_is_kept(tmp_path, monkeypatch):
    """The cache folder of another user, whose HOME a process has inherited: even plain text ended in a traceback."""

    def refuse(*ignored, **too):
        raise PermissionError(13, "Permission denied")

    file = tmp_path / "step.pt2"
    file.write_text("")
    assert graphs.is_kept(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        assert not graphs.is_kept(file)


def test_a_compiler_that_fails_is_told_in_a_line_and_leaves_nothing(tmp_path, monkeypatch):
    """Its error came through as torch raised it, and whoever would have gone on the plain way ended with it."""
    import torch._inductor
    from torch._inductor.exc import InductorError

    def fail(*ignored, **too):
        raise InductorError(RuntimeError("cannot find -lm\nand forty lines more"), None)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    monkeypatch.setattr(graphs, "compiler", lambda: "old-g++")
    with pytest.raises(ClockhandError, match=r"^compiling a step with old-g\+\+ failed: .*cannot find -lm$"):
        graphs.load_or_compile(tmp_path / "step.pt2", lambda: None)
    assert list(tmp_path.iterdir()) == []


def test_a_graph_with_a_hole_is_made_again(tmp_path, monkeypatch):
    """torch loads such an archive without a word, and the first step ends the process, or is wrong."""
    file, made = tmp_path / "step.pt2", []
    monkeypatch.setattr(graphs, "load", lambda file: "run")
    monkeypatch.setattr(graphs, "compiler", lambda: "g++")
    monkeypatch.setattr(graphs, "compile_into", lambda file, *others: made.append(file))
    with ZipFile(file, "w") as archive:
        archive.writestr("step.so", bytes(range(1, 256)) * 40)
    assert graphs.load_or_compile(file, lambda: None) == "run"
    assert made == [], "the control: a whole one is only loaded"
    whole = file.read_bytes()
    for damaged in (whole[:5000] + bytes(50) + whole[5050:], whole[:5000], b"junk", b""):
        file.write_bytes(damaged)
        assert graphs.load_or_compile(file, lambda: None) == "run"
        assert made == [file]
        made.clear()


def _called(part):
    """The functions and classes of clockhand/infer that the code of a function, or of a class's methods, names."""
    functions = [each for each in vars(part).values() if inspect.isfunction(each)] if inspect.isclass(part) else [part]
    for function in functions:
        codes = [function.__code__]
        for code in codes:
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            for name in code.co_names:
                found = function.__globals__.get(name)
                if callable(found) and getattr(found, "__module__", "").startswith("clockhand.infer."):
                    yield inspect.unwrap(found)


@pytest.mark.parametrize(
    ("module", "whole"), [(step, step.Step), (fused, fused.ManyStep), (chunk, chunk.Before), (chunk, chunk.After)]
)
def test_a_graph_is_another_one_when_anything_that_its_step_calls_is_written_otherwise(module, whole, monkeypatch):
    named = []
    monkeypatch.setattr(module, "sources", lambda *parts: named.extend(parts) or "")
    module._source.__wrapped__()
    reached = [whole]
    for part in reached:
        reached += [each for each in _called(part) if each not in reached]
    assert len(reached) > 5
    assert {each.__name__ for each in reached} <= {part.__name__ for part in named}
