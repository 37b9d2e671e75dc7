"""The folder of compiled graphs."""

import os

from clockhand.infer import graphs


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
