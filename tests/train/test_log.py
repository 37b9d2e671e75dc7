"""log.jsonl: whole lines, no step twice, and nothing a JSON reader stumbles over."""

import json
import math

import pytest

from clockhand.errors import ClockhandError
from clockhand.train.log import RunLog, read_log


def write(path, steps, start=0):
    log = RunLog(path, start)
    for step in steps:
        log.write({"step": step, "train/loss": step / 3})
    log.close()


def steps(path) -> list[int]:
    return [row["step"] for row in read_log(path)]


def test_resuming_drops_the_lines_from_that_step_on_and_leaves_the_others_byte_for_byte(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(5))
    before = path.read_text()
    write(path, range(3, 6), start=3)
    assert steps(path) == [0, 1, 2, 3, 4, 5]
    assert path.read_text().startswith(before)


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(3))
    path.write_text(path.read_text()[:-5])
    assert steps(path) == [0, 1]
    write(path, [2], start=2)
    assert steps(path) == [0, 1, 2]


def test_a_fresh_run_starts_an_empty_log(tmp_path):
    write(tmp_path / "log.jsonl", range(3))
    write(tmp_path / "log.jsonl", [0])
    assert steps(tmp_path / "log.jsonl") == [0]


def test_a_number_that_is_none_becomes_null(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", 0)
    log.write({"step": 0, "train/loss": math.nan, "train/grad_norm": math.inf})
    log.close()
    line = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=lambda name: 1 / 0)
    assert line == {"step": 0, "train/loss": None, "train/grad_norm": None}


def test_a_full_disk_is_said_in_one_line_and_closing_says_no_more(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", 0)
    log.close()
    log._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(ClockhandError, match=r"^cannot write .*log.jsonl'?: No space left on device"):
        log.write({"step": 0})
    log.close()


def test_a_sample_with_odd_line_ends_stays_on_one_line(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", 0)
    log.write({"step": 0, "sample": "a\nb\u2028c\x85d\re"})
    log.close()
    assert read_log(tmp_path / "log.jsonl") == [{"step": 0, "sample": "a\nb\u2028c\x85d\re"}]


@pytest.mark.parametrize("line", ["{}", '{"step": "1"}', "[1]", "1"])
def test_a_whole_line_without_a_step_is_named_and_the_file_left_alone(tmp_path, line):
    path = tmp_path / "log.jsonl"
    write(path, range(2))
    path.write_text(path.read_text() + line + "\n")
    before = path.read_text()
    with pytest.raises(ClockhandError, match=r"^line 3 of .*log.jsonl has no step"):
        RunLog(path, 2)
    assert path.read_text() == before
