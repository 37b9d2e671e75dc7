"""What a person sees: lines on a pipe, a bar on a terminal."""

import io

from rich.console import Console

from clockhand.train.progress import BarReporter, LineReporter, describe, make_reporter

ROWS = [
    {"step": 0, "val/loss": 5.5, "val/bpb": 2.25, "train/loss": 5.6, "train/lr": 1e-3, "train/tok_per_s": 12345.6},
    {"step": 1, "train/loss": 4.0, "train/lr": 2e-3, "train/tok_per_s": 23456.7},
    {"step": 2, "val/loss": 3.5, "val/bpb": 1.5, "sample": "two [bold]\nlines"},
]


def shown(reporter) -> None:
    reporter.start(0, 2)
    for row in ROWS:
        reporter.row(row)
    reporter.note("a word [/]")
    reporter.stop()


def test_a_pipe_gets_plain_lines_for_evaluations_and_samples():
    stream = io.StringIO()
    shown(LineReporter(stream))
    assert stream.getvalue().splitlines() == [
        "step 0/2  validation loss 5.5000  2.250 bits/byte  loss 5.6000  lr 1.00e-03  12,346 tok/s",
        "step 2/2  validation loss 3.5000  1.500 bits/byte",
        "    two [bold]",
        "    lines",
        "a word [/]",
    ]


def test_the_first_two_steps_do_not_count_for_the_time_left(monkeypatch):
    """They compile: 100 seconds each here, of which a forecast from all steps would make more than an hour."""
    clock = iter([0, 100, 200, 201, 202, 203])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    reporter = LineReporter(stream := io.StringIO())
    reporter.start(5, 105)
    for step in range(6, 11):
        reporter.row({"step": step, "val/loss": 1.0})
    lines = stream.getvalue().splitlines()
    assert lines[1] == "step 7/105  validation loss 1.0000"
    assert lines[-1] == "step 10/105  validation loss 1.0000  1 min 35 s left"


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    shown(BarReporter(console))
    text = console.file.getvalue()
    assert "step 2  validation loss 3.5000  1.500 bits/byte" in text
    assert "two [bold]" in text  # text is not taken for markup
    assert "loss 4.0000  23,457 tok/s" in text
    assert "2/2" in text


def test_stderr_that_is_no_terminal_gets_lines():
    assert isinstance(make_reporter(), LineReporter)


def test_a_loss_that_is_no_number_can_be_shown():
    assert describe({"step": 1, "train/loss": float("nan")}) == "loss nan"
