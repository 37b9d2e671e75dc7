"""The resume certificate, small; and fifty kills at the moments where a run could be hurt most (slow)."""

import dataclasses
import json
import math
import random
import shutil
import subprocess
import sys

import pytest

from clockhand.errors import ClockhandError
from clockhand.train import loop, settle
from clockhand.train.loop import train
from clockhand.train.progress import Reporter
from clockhand.train.prove import first_difference, lines_of, prove_resume


def test_a_killed_run_ends_in_the_same_bits_and_the_certificate_says_when_it_was_killed(
    model_config, train_config, corpus, tmp_path
):
    assert model_config.dropout > 0
    assert train_config.accumulate > 1
    said: list[str] = []
    certificate = prove_resume(model_config, train_config, corpus, 2, tmp_path, said.append)
    assert certificate.difference == ""
    assert 1 <= len(certificate.kills) <= 2
    assert certificate.hashes.keys() == {"weights", "optimizer", "best", "log"}
    for kill in certificate.kills:
        assert kill.kept <= kill.logged + 1
    assert "10 steps straight and again with 2 kills, each of which repeats up to 4 steps" in said[0]
    assert lines_of(certificate)[0].startswith("resume is exact to the bit: 10 steps,")

    # The certificate is of the run that anybody would have made.
    train(model_config, train_config, corpus, tmp_path / "here")
    assert first_difference(tmp_path / "straight", tmp_path / "here") == ""


@pytest.mark.slow
def test_a_compiled_run_in_bf16_under_muon_is_proved_and_its_kills_leave_nothing_behind(corpus):
    """Another process, so that what Python says of leftovers when it ends is read too."""
    size = "--set d_model=32 --set n_layers=2 --set n_heads=2 --set d_ff=64 --set max_seq_len=64 --seq-len 32"
    run = "--compile on --dtype bfloat16 --optimizer muon --steps 12 --save-every 3 --eval-every 5 --batch-size 2"
    verb = [sys.executable, "-m", "clockhand.cli", "train", "--prove-resume", "--kills", "2", "--data", corpus.folder]
    done = subprocess.run([*verb, *size.split(), *run.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resume is exact to the bit: 12 steps, " in done.stdout
    assert "killed     " in done.stdout, "the control: processes were killed"
    assert "leaked" not in done.stderr


def test_a_run_that_cannot_be_made_is_refused_with_its_own_reason(model_config, train_config, corpus, tmp_path):
    too_long = dataclasses.replace(train_config, seq_len=128)
    with pytest.raises(ClockhandError, match=r"does not reach its end: seq_len = 128 must be at most"):
        prove_resume(model_config, too_long, corpus, 1, tmp_path, lambda line: None)


def test_what_auto_was_for_a_run_that_died_before_its_first_checkpoint_it_stays(
    model_config, train_config, corpus, tmp_path, monkeypatch
):
    """Otherwise a busier moment of the machine could choose another precision, and end in other bits."""
    config = dataclasses.replace(train_config, dtype="auto", compile="off")

    class Dies(Reporter):
        def row(self, row) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(settle, "WORTH_BF16", 0)
    monkeypatch.setattr(settle, "NARROW", 0)
    with pytest.raises(KeyboardInterrupt):
        train(model_config, config, corpus, tmp_path / "run", Dies())
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    monkeypatch.setattr(settle, "WORTH_BF16", math.inf)
    train(model_config, config, corpus, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["dtype"] == "bfloat16"


def test_control_dropout_of_another_seed_after_a_kill_is_found_at_the_first_step_it_touches(
    model_config, train_config, corpus, tmp_path, monkeypatch
):
    class Dies(Reporter):
        def row(self, row) -> None:
            if row["step"] == 6:
                raise KeyboardInterrupt

    train(model_config, train_config, corpus, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        train(model_config, train_config, corpus, tmp_path / "killed", Dies())
    monkeypatch.setattr(loop, "step_seed", lambda seed, step, rank=0: 5)
    train(model_config, train_config, corpus, tmp_path / "killed")
    assert first_difference(tmp_path / "straight", tmp_path / "killed").startswith("log, step 4: train/loss is ")


def test_the_first_difference_of_two_runs_is_named(model_config, train_config, corpus, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    train(model_config, train_config, corpus, a)
    shutil.copytree(a, b)
    assert first_difference(a, b) == ""

    from safetensors.torch import load_file, save_file

    file = b / "checkpoints" / "step-00000010" / "training.safetensors"
    memory = load_file(file)
    memory["exp_avg/blocks.1.mlp.up_proj.weight"][0, 2] += 1
    save_file(memory, file)
    assert first_difference(a, b).startswith("optimizer: exp_avg/blocks.1.mlp.up_proj.weight, value 2, is ")

    log = b / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows[4]["train/lr"] *= 2
    rows[2]["time"] = 0  # a clock may differ
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert first_difference(a, b).startswith("log, step 4: train/lr is ")
    log.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert first_difference(a, b) == "log: 11 lines straight and 3 killed"


FIFTY_KILLS = """
import json, os, random, signal, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from clockhand.config import ModelConfig
from clockhand.data.shards import Corpus
from clockhand import disk
from clockhand.train import checkpoint, evaluate, loop, parallel
from clockhand.train.config import TrainConfig

model, train, corpus, out, moments = sys.argv[1:]
model, train, corpus = ModelConfig(**json.loads(model)), TrainConfig(**json.loads(train)), Corpus.open(corpus)

PLACES = {  # where each is called by the run, and the word for a moment just before or after such a call
    "micro-batch": (loop, "count_targets"),
    "forward": (parallel, "batch_loss"),
    "evaluation": (loop.Trainer, "_nats"),
    "checkpoint": (checkpoint, "save_file"),
    "weights": (checkpoint, "save_model"),
    "to the disk": (disk, "_to_disk"),
    "best": (loop, "save_best"),
    "removing old": (checkpoint.shutil, "rmtree"),
    "log": (loop.RunLog, "write"),
    "optimizer": (torch.optim.AdamW, "step"),
}

def die_at(place, calls, after):
    owner, name = PLACES[place]
    wrapped, left = getattr(owner, name), [calls]
    def counted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = wrapped(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer
    setattr(owner, name, counted)

died = []
for place, calls, after in json.loads(moments):
    child = os.fork()
    if child == 0:
        die_at(place, calls, after)
        loop.train(model, train, corpus, Path(out))
        os._exit(0)
    died.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL)
loop.train(model, train, corpus, Path(out))
print(json.dumps(died))
"""

# The most calls before a process is killed: it mostly gets to the next checkpoint, and not always.
PLACES = {
    "micro-batch": 30, "forward": 20, "evaluation": 5, "checkpoint": 2, "weights": 2, "to the disk": 25, "best": 1,
    "removing old": 3, "log": 8, "optimizer": 8,
}  # fmt: skip


@pytest.mark.slow
def test_fifty_kills_at_the_worst_moments_change_nothing(model_config, train_config, corpus, tmp_path):
    """Within a step, an evaluation, a checkpoint and its exchange, the log, and across the border of an epoch."""
    config = dataclasses.replace(train_config, steps=300, save_every=5, eval_every=3, keep_last=2, warmup_steps=10)
    assert model_config.dropout > 0
    assert config.accumulate > 1
    samples = config.steps * config.batch_size * config.accumulate
    from clockhand.data.loader import TrainWindows

    assert samples > 2 * TrainWindows(corpus, 2, config.seq_len).windows_per_epoch, "several epochs"
    train(model_config, config, corpus, tmp_path / "straight")

    draw = random.Random(0)
    moments = [
        (place, draw.randint(1, PLACES[place]), draw.random() < 0.5) for place in [*PLACES] * (50 // len(PLACES))
    ]
    draw.shuffle(moments)
    configs = [json.dumps(dataclasses.asdict(each)) for each in (model_config, config)]
    script = [sys.executable, "-c", FIFTY_KILLS, *configs, corpus.folder, tmp_path / "killed", json.dumps(moments)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    died = json.loads(done.stdout.splitlines()[-1])
    hit = dict.fromkeys(PLACES, 0)
    for (place, _, _), dead in zip(moments, died):
        hit[place] += dead
    assert sum(died) == 50, hit
    assert first_difference(tmp_path / "straight", tmp_path / "killed") == ""
