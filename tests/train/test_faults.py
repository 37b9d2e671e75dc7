"""What is damaged, absurd or in the way: one line that says so, and nothing is lost."""

import dataclasses
import json
import re
import shutil
import time

import pytest

from clockhand import cli, memory
from clockhand.errors import ClockhandError
from clockhand.interop.hf import save_model
from clockhand.model.transformer import Transformer
from clockhand.train.checkpoint import remove_old
from clockhand.train.config import TrainConfig
from clockhand.train.log import RunLog, read_log
from clockhand.train.loop import train
from clockhand.train.plan import Speed, forecast_seconds, measure_speed
from clockhand.train.progress import FIRST_STEPS, LineReporter, Reporter
from clockhand.train.run_folder import check_resume
from clockhand.train.runs import find_runs, read_run
from clockhand.train.spikes import History

# The log


def lines_of_steps(path, steps):
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))


def test_a_line_damaged_in_the_middle_of_the_log_is_named_and_the_lines_behind_it_are_not_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 0}\n\xff\xfe\x00\n{"step": 2}\n')
    before = path.read_bytes()
    with pytest.raises(ClockhandError, match=r"^line 2 of .*log.jsonl is damaged, and the run stands at step 3"):
        RunLog(path, 3)
    assert path.read_bytes() == before
    assert len(read_log(path)) == 1  # whoever only looks sees what is before it


def test_control_a_damaged_line_of_a_step_that_will_be_made_again_is_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 0}\n\xff\xfe\x00\n{"step": 2}\n')
    RunLog(path, 1).close()
    assert read_log(path) == [{"step": 0}]


@pytest.mark.parametrize("value", ["1" + "0" * 400, "true", "1e999", '"2"', "[]"])
def test_a_number_of_the_log_that_is_none_is_named(tmp_path, value):
    path = tmp_path / "log.jsonl"
    path.write_text(f'{{"step": 0, "train/loss": {value}}}\n')
    with pytest.raises(ClockhandError, match=r"^line 1 of .*log.jsonl has train/loss = .*, which is no number"):
        read_log(path)


def test_nan_in_a_log_is_read_as_null(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 0, "time": NaN, "val/loss": -Infinity}\n')
    assert read_log(path) == [{"step": 0, "time": None, "val/loss": None}]


def test_a_log_that_is_a_folder_is_one_line(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(ClockhandError, match=r"^cannot read .*log.jsonl: Is a directory"):
        read_log(tmp_path / "log.jsonl")


def test_a_row_without_a_gradient_norm_says_nothing_of_what_is_usual():
    history = History([{"step": 0, "train/loss": 1.0}])
    assert not history.trouble(5.0, 5.0)


# The run folder


def test_a_run_whose_config_is_damaged_is_named_and_goes_on_from_its_checkpoints(
    model_config, train_config, corpus, tmp_path, rows_of
):
    out, straight = tmp_path / "run", tmp_path / "straight"
    for folder in (out, straight):
        train(model_config, train_config, corpus, folder)
    shutil.rmtree(out / "checkpoints" / "step-00000010")
    (out / "config.json").write_text('{"model":')
    notes = []
    assert find_runs(tmp_path, notes.append) == [read_run(straight)]
    assert [re.sub(".*/", "", note) for note in notes] == [
        "run is left out: its config.json is damaged; going on with the run writes it again"
    ]
    with pytest.raises(ClockhandError, match="holds a run"):
        check_resume(out, "never")
    train(model_config, train_config, corpus, out)
    assert rows_of(out) == rows_of(straight)
    assert read_run(out).state == "finished"


def test_what_stands_in_the_way_is_named(model_config, train_config, corpus, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(ClockhandError, match=r"^cannot write to --out .*run: File exists \(.*run/checkpoints\)$"):
        train(model_config, train_config, corpus, tmp_path / "run")


def test_a_checkpoint_that_cannot_be_removed_stays_with_a_line(tmp_path, monkeypatch):
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}").mkdir()

    def refuse(folder):
        raise PermissionError(1, "Operation not permitted", "model.safetensors")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    lines = []
    remove_old(tmp_path, 1, 2, lines.append)
    assert lines == [f"cannot remove {tmp_path / 'step-00000001'}: Operation not permitted; it stays"]


# Numbers beyond all measure


def test_a_run_longer_than_any_calendar_can_be_told(capsys):
    steps = 10**18
    reporter = LineReporter()
    reporter.start(0, steps)
    for step in (FIRST_STEPS, FIRST_STEPS + 1):
        reporter.row({"step": step, "val/loss": 1.0})
        time.sleep(0.001)
    assert re.search(r"  [\d ]+ h \d\d min left", capsys.readouterr().err)
    assert forecast_seconds(TrainConfig(steps=steps), Speed(1.0, 1.0)) > steps


@pytest.mark.parametrize("name", ["steps", "eval_windows", "sample_tokens", "keep_last"])
def test_a_number_that_no_computer_counts_to_is_refused(name):
    with pytest.raises(ClockhandError, match=f"^{name} = 9223372036854775808 must be below"):
        TrainConfig(**{name: 2**63})


def test_a_micro_batch_beyond_all_memory_is_refused_before_it_is_tried(
    model_config, train_config, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "total_memory", lambda: 2**30)
    absurd = dataclasses.replace(train_config, batch_size=10**7, dtype="float32", compile="off")
    refused = r"^batch_size = 10000000 rows of seq_len = 32 need more than [\d.]+ GiB to train, and .* has 1.0"
    with pytest.raises(ClockhandError, match=refused):
        train(model_config, absurd, corpus, tmp_path / "run")
    with pytest.raises(ClockhandError, match=refused):
        measure_speed(model_config, absurd)


def test_memory_that_torch_is_refused_is_one_line():
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 102400000000 bytes.")
    code, line = cli.outcome(error)
    assert (code, (line or "")[:24]) == (1, "error: not enough memory")


@pytest.mark.parametrize("kills", ["0", "10001"])
def test_a_number_of_kills_that_would_never_end_is_refused(kills, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--data", "builtin:shakespeare", "--prove-resume", "--kills", kills])
    assert end.value.code == 1
    assert capsys.readouterr().err == f"error: --kills {kills} must be between 1 and 10,000\n"


# Samples


def test_a_sample_prompt_longer_than_the_model_reaches_is_refused_at_once(model_config, train_config, corpus, tmp_path):
    config = dataclasses.replace(train_config, sample_prompt="x" * 65, sample_every=10)
    with pytest.raises(ClockhandError, match=r"^sample_prompt is of 66 tokens, and .* at most max_seq_len = 64"):
        train(model_config, config, corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    train(model_config, dataclasses.replace(config, sample_every=0), corpus, tmp_path / "run", Reporter())


def test_a_sample_prompt_that_no_file_can_hold_is_refused():
    with pytest.raises(ClockhandError, match=r"^sample_prompt = .* must be text that UTF-8 can hold"):
        TrainConfig(sample_prompt="a\udcff")


def test_eval_says_why_there_was_no_text(model_config, corpus, tmp_path, capsys):
    save_model(Transformer(model_config), tmp_path / "model", corpus.tokenizer)
    (tmp_path / "table.csv").write_text("text\na\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["eval", str(tmp_path / "model"), "--data", str(tmp_path / "table.csv"), "--text-field", "story"])
    assert end.value.code == 1
    assert re.fullmatch(r"error: no text in .*table.csv: .*story.*\n", capsys.readouterr().err)
