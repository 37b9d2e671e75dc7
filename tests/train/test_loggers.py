"""Other programs are told the numbers of a run, once each."""

import sys
import types

import pytest

from clockhand import lock
from clockhand.errors import ClockhandError
from clockhand.train.loggers import WandbReporter, WithLogger, numbers_of, with_logger
from clockhand.train.loop import train
from clockhand.train.progress import Reporter


class Heard(Reporter):
    def __init__(self) -> None:
        self.rows: list[dict] = []

    def row(self, row) -> None:
        self.rows.append(row)
        if row["step"] == 5 and len(self.rows) == 6:
            raise KeyboardInterrupt


def test_tensorboard_gets_every_number_and_a_resumed_run_takes_back_what_it_repeats(
    model_config, train_config, corpus, tmp_path, monkeypatch
):
    writers = []

    class Writer:
        def __init__(self, folder, purge_step) -> None:
            self.folder, self.purged, self.scalars, self.closed = folder, purge_step, {}, False
            writers.append(self)

        def add_scalar(self, key, value, step) -> None:
            self.scalars[key, step] = value

        def close(self) -> None:
            self.closed = True

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    heard, out = Heard(), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(model_config, train_config, corpus, out, with_logger(heard, "tensorboard", out))
    train(model_config, train_config, corpus, out, with_logger(heard, "tensorboard", out))
    assert [(each.folder, each.purged, each.closed) for each in writers] == [
        (str(out / "tensorboard"), 0, True), (str(out / "tensorboard"), 4, True)
    ]  # fmt: skip
    assert {step for _, step in writers[1].scalars} == set(range(4, 11))
    assert writers[1].scalars["train/loss", 9] == heard.rows[-2]["train/loss"]
    assert writers[1].scalars["val/loss", 10] == heard.rows[-1]["val/loss"]


def test_wandb_gets_the_same_rows_and_goes_on_with_the_same_run(
    model_config, train_config, corpus, tmp_path, monkeypatch
):
    runs = []

    class Run:
        def __init__(self, **settings) -> None:
            self.settings, self.logged, self.finished, self.axes = settings, {}, False, {}
            self.at = 99 if runs else 0  # W&B's own count goes on with the run
            runs.append(self)

        def define_metric(self, name, step_metric) -> None:
            self.axes[name] = step_metric

        def log(self, numbers, step=None) -> None:
            if step is not None and step < self.at:
                return  # as W&B does, with a warning
            self.at = self.at + 1 if step is None else step
            self.logged[numbers[self.axes["*"]]] = numbers

        def finish(self) -> None:
            self.finished = True

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=Run))
    out = tmp_path / "run"
    for _ in range(2):
        train(model_config, train_config, corpus, out, with_logger(Reporter(), "wandb", out))
    assert runs[0].logged.keys() == set(range(11))
    assert runs[0].finished
    assert runs[0].settings["id"] == runs[1].settings["id"]
    assert runs[0].settings["resume"] == "allow"
    assert "val/bpb" in runs[0].logged[10]
    repeated = WandbReporter(sys.modules["wandb"], out)
    repeated.start(4, 10)
    repeated.row({"step": 5, "train/loss": 1.0})
    assert runs[2].logged[5]["train/loss"] == 1.0  # dropped before, though the docstring said otherwise


@pytest.mark.parametrize(("logger", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_logger_that_is_not_installed_is_one_line(tmp_path, monkeypatch, logger, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ClockhandError, match=f"^--logger {logger} needs .*: pip install {logger}$"):
        with_logger(Reporter(), logger, tmp_path)


def test_an_unknown_logger_is_refused_and_none_is_nobody(tmp_path):
    with pytest.raises(ClockhandError, match=r"^--logger neptune must be none | tensorboard | wandb"):
        with_logger(Reporter(), "neptune", tmp_path)
    reporter = Reporter()
    assert with_logger(reporter, "none", tmp_path) is reporter


def test_only_numbers_are_drawn():
    row = {"step": 3, "time": 1.5, "train/loss": 2.0, "train/trouble": "loss nan", "train/skipped": True, "sample": "a"}
    assert numbers_of(row) == {"time": 1.5, "train/loss": 2.0, "train/skipped": True}


class Fails(Reporter):
    def __init__(self, where: str) -> None:
        self.where, self.rows = where, 0

    def start(self, step, steps) -> None:
        if self.where == "start":
            raise RuntimeError("no key:\n log in first")

    def row(self, row) -> None:
        self.rows += 1
        if self.where == "row" and row["step"] == 3:
            raise ConnectionError("gone")

    def stop(self) -> None:
        if self.where == "stop":
            raise ConnectionError("gone")


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line) -> None:
        self.notes.append(line)


def test_a_logger_that_does_not_start_is_one_line_and_leaves_the_folder_free(
    model_config, train_config, corpus, tmp_path
):
    out = tmp_path / "run"
    with pytest.raises(ClockhandError, match=r"^--logger wandb does not start: RuntimeError: no key: log in first$"):
        train(model_config, train_config, corpus, out, WithLogger(Reporter(), Fails("start"), "wandb"))
    assert not lock.is_held(out / ".lock")
    train(model_config, train_config, corpus, out)


@pytest.mark.parametrize(("where", "heard"), [("row", 4), ("stop", 11)])
def test_a_logger_that_fails_on_the_way_is_told_of_once_and_the_run_goes_on(
    model_config, train_config, corpus, tmp_path, where, heard
):
    notes, logger = Notes(), Fails(where)
    train(model_config, train_config, corpus, tmp_path, WithLogger(notes, logger, "wandb"))
    assert [line for line in notes.notes if "wandb" in line] == [
        "--logger wandb has failed and hears no more: ConnectionError: gone"
    ]
    assert logger.rows == heard
    assert (tmp_path / "final").is_dir()
