"""What a run folder says of its run, and the picture at its end."""

import dataclasses
import json
import subprocess
import sys

import pytest

from clockhand import lock
from clockhand.errors import ClockhandError
from clockhand.train.curves import draw_curves
from clockhand.train.loop import train
from clockhand.train.progress import Reporter
from clockhand.train.runs import Run, duration, find_runs, read_run, runs_table, summary


class Dies(Reporter):
    def row(self, row) -> None:
        if row["step"] == 5:
            raise KeyboardInterrupt


def test_runs_are_found_with_their_progress_losses_and_state(model_config, train_config, corpus, tmp_path, rows_of):
    train(model_config, train_config, corpus, tmp_path / "deep" / "b")
    with pytest.raises(KeyboardInterrupt):
        train(model_config, train_config, corpus, tmp_path / "a", Dies())
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "config.json").write_text("{}")
    for number, foreign in enumerate(("[]", '{"train": []}', '{"model": [], "train": {"steps": "many"}}')):
        (tmp_path / f"foreign-{number}").mkdir()
        (tmp_path / f"foreign-{number}" / "config.json").write_text(foreign)
        (tmp_path / f"foreign-{number}" / "log.jsonl").write_text('{"epoch": 1}\n')
    stopped, finished = find_runs(tmp_path)
    assert (stopped.folder, stopped.state, stopped.step, stopped.steps) == (str(tmp_path / "a"), "stopped", 6, 10)
    assert (finished.state, finished.step, finished.tokens) == ("finished", 10, 10 * 2 * 2 * 32)
    rows = rows_of(tmp_path / "deep" / "b")
    assert finished.train_loss == rows[9]["train/loss"]
    assert finished.val_loss == rows[10]["val/loss"]
    assert finished.best_val_loss == min(row["val/loss"] for row in rows if "val/loss" in row)
    assert finished.preset == "-", "a model of nobody's"


def test_a_run_is_running_while_a_process_holds_it(model_config, train_config, corpus, tmp_path):
    train(model_config, train_config, corpus, tmp_path)
    assert not (tmp_path / ".lock").exists()
    assert lock.take(tmp_path / ".lock")
    try:
        assert read_run(tmp_path).state == "running"
        script = "import sys, pathlib; from clockhand.train.runs import *; print(read_run(Path(sys.argv[1])).state)"
        other = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
        assert other.stdout.strip() == "running"
    finally:
        lock.release(tmp_path / ".lock")
    assert read_run(tmp_path).state == "finished"


def test_a_preset_is_known_by_its_numbers(tmp_path):
    from clockhand.presets import build

    (tmp_path / "log.jsonl").write_text("")
    for name, changes, expected in (
        ("tiny", {"vocab_size": 300}, "tiny"),
        ("mini-llama", {}, "mini-llama"),
        ("tiny", {"d_ff": 64}, "-"),
    ):
        model = dataclasses.asdict(build(name, **changes))
        (tmp_path / "config.json").write_text(json.dumps({"model": model, "train": {"steps": 5}}))
        assert read_run(tmp_path).preset == expected


def test_the_list_of_runs_breaks_no_line_and_leaves_out_what_a_narrow_terminal_has_no_room_for():
    from rich.console import Console

    runs = [
        Run("runs/char-shakespeare", "mini-llama", "finished", 2000, 2000, 1.2, 1.3, 1.3, 1750, 10, 75.0, 0),
        Run("runs/b", "-", "stopped", 6, 10, None, None, None, None, 10, 7262.0, 0),
    ]

    def listed(width: int | None) -> tuple[list[str], list[str]]:
        table, left_out = runs_table(runs, width)
        console = Console(width=width or 80, color_system=None)
        with console.capture() as capture:
            console.print(table, crop=False)
        return capture.get().splitlines(), left_out

    (title, first, second), left_out = listed(None)
    assert left_out == []
    assert title.split() == ["run", "preset", "state", "step", "train", "validation", "best", "time"]
    assert first.endswith("1.3000 at 1,750  1 min 15 s")
    assert second.endswith("2 h 01 min")
    lines, left_out = listed(80)
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert left_out == ["train", "preset", "validation"]
    assert "2 h 01 min" in lines[2]
    lines, left_out = listed(40)
    assert len(lines) == 3
    assert left_out == ["train", "preset", "validation", "time"]
    assert "runs/char-shakespeare  finished" in lines[1]


def test_the_last_word_names_the_best_step_when_it_was_not_the_last(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": {}, "train": {"steps": 3}}))
    rows = [
        {"step": 0, "time": 0.0, "val/loss": 9.0, "train/loss": 9.0, "train/tokens": 100},
        {"step": 1, "time": 60.0, "val/loss": 2.0, "train/loss": None, "train/tokens": 200, "train/skipped": True},
        {"step": 2, "time": 100.0, "train/loss": 3.0, "train/tokens": 300},
        {"step": 3, "time": 150.0, "val/loss": 2.5},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = summary(read_run(tmp_path))
    assert text == (
        "3 steps, 300 tokens in 2 min 30 s, 2 tokens a second; 1 step not applied\n"
        "best validation loss 2.0000 at step 1"
    )
    assert [duration(each) for each in (0.4, 59.6, 3661)] == ["0 s", "1 min 00 s", "1 h 01 min"]


def test_loss_curves_are_drawn_from_the_log_with_gaps_where_there_is_no_number(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [{"step": s, "train/loss": None if s == 3 else 5 - s / 4, "train/lr": 0.1} for s in range(8)]
    rows[3]["train/skipped"] = True
    rows[4]["val/loss"] = 4.0
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = draw_curves(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    (tmp_path / "log.jsonl").write_text("")
    assert draw_curves(tmp_path).is_file()


def test_without_matplotlib_there_is_a_line_and_no_picture(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ClockhandError, match="needs matplotlib"):
        draw_curves(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_whose_log_is_damaged_is_named_and_the_others_are_listed(tmp_path):
    notes = []
    for name, line in {"good": '{"step": 0, "val/loss": 2.0}', "bad": '{"step": 0, "val/loss": "two"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model": {}, "train": {"steps": 3}}')
        (tmp_path / name / "log.jsonl").write_text(line + "\n")
    assert [run.folder for run in find_runs(tmp_path, notes.append)] == [str(tmp_path / "good")]
    (note,) = notes
    assert "bad is left out: line 1 of" in note
    assert note.endswith("has val/loss = 'two', which is no number")
