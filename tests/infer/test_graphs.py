"""The folder of compiled graphs."""

import inspect
import os
from types import CodeType

import pytest

from clockhand.infer import chunk, fused, graphs, step


def test_of_many_graphs_those_used_last_stay_and_nothing_else_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2)
    for age, name in enumerate(["new.pt2", "middle.pt2", "old.pt2", "older.pt2", "older.txt"]):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    graphs.forget_unused(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"new.pt2", "middle.pt2", "older.txt"}


def test_loading_a_graph_counts_as_using_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._C._aoti.AOTIModelPackageLoader", lambda *ignored: type("Loader", (), {"run": None}))
    file = tmp_path / "step.pt2"
    file.write_text("")
    os.utime(file, (1000, 1000))
    graphs.load(file)
    assert file.stat().st_mtime > 1000


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
