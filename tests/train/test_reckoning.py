"""What was forecast stands beside what happened, for the part of the run that did."""

import dataclasses
import os
import re
import signal

import pytest
import torch

from clockhand.memory import count_peak_from_here, peak_resident_bytes
from clockhand.train import reckoning
from clockhand.train.interrupt import Interrupted
from clockhand.train.loop import train
from clockhand.train.progress import Reporter

needs_proc = pytest.mark.skipif(count_peak_from_here() is None, reason="no /proc that forgets a peak")


class Notes(Reporter):
    def __init__(self, stops_at: int | None = None) -> None:
        self.notes: list[str] = []
        self.stops_at = stops_at

    def note(self, line) -> None:
        self.notes.append(line)

    def row(self, row) -> None:
        if row["step"] == self.stops_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def said(self, word: str) -> list[str]:
        return [line for line in self.notes if line.startswith(word)]


@needs_proc
def test_a_run_says_memory_and_time_for_the_steps_that_this_process_has_made(
    model_config, train_config, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(reckoning, "WORTH", 4)
    config = dataclasses.replace(train_config, compile="off")
    first, then = Notes(stops_at=5), Notes()
    with pytest.raises(Interrupted):
        train(model_config, config, corpus, tmp_path, first, timed=True)
    train(model_config, config, corpus, tmp_path, then, timed=True)
    for notes, steps in ((first, 6), (then, 4)):
        (memory,), (time,) = notes.said("memory"), notes.said("time")
        assert re.fullmatch(r"memory: grew by [\d.]+ GB at most; [\d.]+ GB were forecast", memory)
        assert re.fullmatch(rf"time: {steps} steps and their evaluations took .*; .* were forecast", time)


def test_time_is_forecast_only_where_the_run_is_long_enough_and_somebody_asks(
    model_config, train_config, corpus, tmp_path, monkeypatch
):
    def refuse(*arguments):
        raise AssertionError("steps are tried out")

    monkeypatch.setattr(reckoning, "measure_speed", refuse)
    config = dataclasses.replace(train_config, compile="off")
    train(model_config, config, corpus, tmp_path / "short", notes := Notes(), timed=True)
    assert not notes.said("time")
    monkeypatch.setattr(reckoning, "WORTH", 4)
    train(model_config, config, corpus, tmp_path / "unasked", notes := Notes())
    assert not notes.said("time")
    with pytest.raises(AssertionError, match="tried out"):
        train(model_config, config, corpus, tmp_path / "asked", Notes(), timed=True)


def test_trying_steps_out_changes_no_bit_of_the_run(
    model_config, train_config, corpus, tmp_path, monkeypatch, rows_of, weights_of
):
    monkeypatch.setattr(reckoning, "WORTH", 4)
    config = dataclasses.replace(train_config, compile="off")
    for name, timed in (("with", True), ("without", False)):
        train(model_config, config, corpus, tmp_path / name, Reporter(), timed=timed)
    assert rows_of(tmp_path / "with") == rows_of(tmp_path / "without")
    assert torch.equal(weights_of(tmp_path / "with"), weights_of(tmp_path / "without"))


@needs_proc
def test_what_was_held_before_does_not_count():
    del (large := [torch.ones(50_000_000)])[:]
    before = count_peak_from_here()
    assert peak_resident_bytes() - before < 20e6
    tensor = torch.ones(25_000_000)
    assert 90e6 < peak_resident_bytes() - before < 130e6, tensor.shape
    assert not large
