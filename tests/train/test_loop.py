"""The loop: what a step does, and that neither interruption nor looking changes what comes out."""

import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from clockhand import lock
from clockhand.config import ModelConfig
from clockhand.data.loader import Batch, TrainWindows, ValidationWindows
from clockhand.data.shards import CorpusSettings, prepare
from clockhand.errors import ClockhandError
from clockhand.interop.hf import load_model
from clockhand.train import checkpoint
from clockhand.train.checkpoint import open_checkpoint
from clockhand.train.config import AUTO
from clockhand.train.evaluate import evaluate
from clockhand.train.interrupt import Interrupted
from clockhand.train.log import read_log
from clockhand.train.loop import Trainer, train
from clockhand.train.loss import IGNORE_INDEX, cross_entropy
from clockhand.train.progress import Reporter


class Windows:
    """In place of TrainWindows: the batches of a list, one after another and from the start again."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def batch(self, number: int) -> Batch:
        return self.batches[number % len(self.batches)]


class At(Reporter):
    """Does something when the row of a step has been written."""

    def __init__(self, step: int, action) -> None:
        self.at, self.action = step, action

    def row(self, row) -> None:
        if row["step"] == self.at:
            self.action()


@pytest.fixture
def trainer(model_config, train_config, corpus, tmp_path):
    """Makes a Trainer in a folder of its own, with some fields changed."""

    def make(model: dict | None = None, **settings) -> Trainer:
        out = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        model_fields = {"dropout": 0.0, **(model or {})}
        return Trainer(
            dataclasses.replace(model_config, **model_fields),
            dataclasses.replace(train_config, **settings),
            corpus,
            out,
            Reporter(),
        )

    return make


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


# What a step does


def four_rows_of_unequal_length(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(vocab_size, (4, 32))
    targets = ids.roll(-1, 1)
    for row, length in enumerate((31, 2, 17, 5)):
        targets[row, length:] = IGNORE_INDEX
    return ids, targets


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "documents"])
@pytest.mark.parametrize("experts", [0, 2])
def test_four_micro_batches_of_one_row_equal_one_of_four_rows(trainer, experts, packed):
    # The balance loss is no sum over tokens, but a product of two means over a micro-batch: it is left out here.
    moe = {"n_experts": experts, "balance_coef": 0.0} if experts else {}
    split, whole = trainer(moe, batch_size=1, accumulate=4), trainer(moe, batch_size=4, accumulate=1)
    ids, targets = four_rows_of_unequal_length(whole.model.config.vocab_size)
    documents = torch.arange(32) // torch.tensor([[5], [11], [32], [3]]) if packed else None  # (4, 32)
    rows = [slice(b, b + 1) for b in range(4)]
    split.windows = Windows([Batch(ids[b], targets[b], None if documents is None else documents[b]) for b in rows])
    whole.windows = Windows([Batch(ids, targets, documents)])
    rows = split.update(), whole.update()
    assert rows[0]["train/loss"] == pytest.approx(rows[1]["train/loss"], rel=1e-6)
    assert rows[0]["train/grad_norm"] == pytest.approx(rows[1]["train/grad_norm"], rel=1e-5)
    assert torch.allclose(parameters(split), parameters(whole), rtol=0, atol=1e-6)


def test_control_a_mean_of_the_means_of_the_micro_batches_is_another_loss(trainer):
    whole = trainer(batch_size=4, accumulate=1)
    ids, targets = four_rows_of_unequal_length(whole.model.config.vocab_size)
    logits = whole.model(ids).logits
    mean_of_means = sum(cross_entropy(logits[b], targets[b]).mean.item() for b in range(4)) / 4
    assert mean_of_means != pytest.approx(cross_entropy(logits, targets).mean.item(), rel=1e-4)


def test_a_step_with_nothing_to_learn_changes_nothing(trainer):
    run = trainer()
    ids = torch.randint(run.model.config.vocab_size, (2, 32))
    run.update()  # so that the optimizer has momentum, which would move the weights even without a gradient
    before = parameters(run)
    run.windows = Windows([Batch(ids, torch.full_like(ids, IGNORE_INDEX), None)])
    row = run.update()
    assert (row["train/loss"], row["train/grad_norm"]) == (0.0, 0.0)
    assert torch.equal(parameters(run), before)


def test_a_tiny_batch_is_learned_by_heart(trainer):
    run = trainer(steps=150, learning_rate=1e-2, accumulate=1)
    run.windows = Windows([run.windows.batch(0)])
    for step in range(run.config.steps):
        run.step = step
        row = run.update()
    assert row["train/loss"] < 0.05


def test_the_balance_loss_is_optimised_but_reported_apart(trainer):
    moe = {"n_experts": 4, "n_experts_per_token": 1}
    with_balance, without = trainer({**moe, "balance_coef": 0.1}), trainer({**moe, "balance_coef": 0.0})
    rows = with_balance.update(), without.update()
    # Before the first update both are the same model: the language-model loss does not see the balance loss.
    assert rows[0]["train/loss"] == rows[1]["train/loss"]
    assert rows[1]["train/balance_loss"] == 0
    # Two layers, each 1 at perfect balance and at most 4: accumulation has not added it up twice.
    assert 0.1 * 2 * 0.9 < rows[0]["train/balance_loss"] < 0.1 * 2 * 4
    # k = 1 renormalised: nothing but the balance loss can move the router.
    routers = [run.model.blocks[0].mlp.router.weight for run in (with_balance, without)]
    assert not torch.equal(*routers)


def test_a_step_that_is_not_finite_is_not_applied(trainer):
    run, notes = trainer(clip_norm=0.0), []
    run.reporter.note = notes.append
    before = parameters(run)
    with torch.no_grad():
        kept = run.model.final_norm.weight.clone()
        run.model.final_norm.weight.fill_(math.nan)
    assert math.isnan(run.update()["train/loss"])
    with torch.no_grad():
        run.model.final_norm.weight.copy_(kept)
    assert torch.equal(parameters(run), before)
    assert "not applied" in notes[0]
    assert math.isfinite(run.update()["train/loss"])
    assert not torch.equal(parameters(run), before)


def test_steps_that_are_not_finite_stop_the_run_after_five(trainer):
    run = trainer()
    with torch.no_grad():
        run.model.final_norm.weight.fill_(math.nan)
    run.evaluate = lambda: pytest.fail("evaluated")
    run.is_due = lambda every: False
    with pytest.raises(ClockhandError, match=r"no step applied from 0 to 4: .* learning_rate = 0.001"):
        run.run()
    assert [row["train/loss"] for row in read_log(run.out / "log.jsonl")] == [None] * 4


@pytest.mark.parametrize("model", [{}, {"n_experts": 2, "qk_norm": True}], ids=["dense", "experts"])
def test_bfloat16_gives_nearly_the_same_loss_and_keeps_fp32_weights(trainer, model):
    half, full = trainer(model, dtype="bfloat16"), trainer(model)
    # bfloat16 has 8 bits of mantissa: each product is off by up to 2^-9 of itself, and the loss averages over many.
    assert half.update()["train/loss"] == pytest.approx(full.update()["train/loss"], rel=1e-2)
    assert half.evaluate().loss == pytest.approx(full.evaluate().loss, rel=1e-2)
    assert not torch.equal(parameters(half), parameters(full))  # so it was not fp32 after all
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


# Runs


def test_a_run_leaves_a_log_checkpoints_and_a_final_model(model_config, train_config, corpus, tmp_path, rows_of):
    evaluation = train(model_config, train_config, corpus, tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(11))
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 3, 6, 9, 10]
    assert set(rows[0]) == {
        "step", "val/loss", "val/bpb", "train/loss", "train/lr", "train/grad_norm", "train/tokens"
    }  # fmt: skip
    assert rows[-1] == {"step": 10, "val/loss": evaluation.loss, "val/bpb": evaluation.bits_per_byte}
    assert rows[-2]["train/lr"] == train_config.min_learning_rate
    assert rows[-2]["train/tokens"] == 10 * 2 * 2 * 32
    assert rows[0]["val/loss"] == pytest.approx(math.log(model_config.vocab_size), rel=0.05)
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]

    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["step-00000004", "step-00000008", "step-00000010"]
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert resolved["model"]["head_dim"] == 8
    assert resolved["train"]["steps"] == 10
    assert not list((tmp_path / "run").rglob(".*"))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of
):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        train(model_config, dataclasses.replace(train_config, seed=seed), corpus, tmp_path / name)
    assert torch.equal(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")
    assert not torch.equal(weights_of(tmp_path / "a"), weights_of(tmp_path / "c"))


def test_evaluating_saving_and_sampling_do_not_change_training(
    model_config, train_config, corpus, tmp_path, weights_of
):
    train(model_config, train_config, corpus, tmp_path / "quiet")
    busy = dataclasses.replace(train_config, eval_every=1, save_every=1, sample_every=2, sample_tokens=5)
    train(model_config, busy, corpus, tmp_path / "busy")
    assert torch.equal(weights_of(tmp_path / "quiet"), weights_of(tmp_path / "busy"))
    rows = read_log(tmp_path / "busy" / "log.jsonl")
    assert [row["step"] for row in rows if "sample" in row] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_interrupted_saves_and_then_ends_bitwise_as_the_straight_run(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of, signum, exit_code
):
    assert model_config.dropout > 0  # otherwise the randomness would not be put to the test
    train(model_config, train_config, corpus, tmp_path / "straight")

    out = tmp_path / "interrupted"
    with pytest.raises(Interrupted) as stopped:
        train(model_config, train_config, corpus, out, At(5, lambda: signal.raise_signal(signum)))
    assert stopped.value.exit_code == exit_code
    assert (out / "checkpoints" / "step-00000006").is_dir()
    assert rows_of(out)[-1]["step"] == 5

    train(model_config, train_config, corpus, out)
    assert torch.equal(weights_of(out), weights_of(tmp_path / "straight"))
    assert rows_of(out) == rows_of(tmp_path / "straight")


def test_a_second_interrupt_stops_at_once(model_config, train_config, corpus, tmp_path):
    def press_twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(model_config, train_config, corpus, tmp_path / "run", At(5, press_twice))
    assert signal.getsignal(signal.SIGINT) is usual
    assert not (tmp_path / "run" / "checkpoints" / "step-00000006").exists()


KILLED_WHILE_SAVING_STEP_8 = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)  # as in conftest.py: another number of threads may add in another order
from clockhand.config import ModelConfig
from clockhand.data.shards import Corpus
from clockhand.train import checkpoint, loop
from clockhand.train.config import TrainConfig

def die_on_the_second_checkpoint(*args):
    if "00000008" in str(args[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    save_file(*args)

save_file, checkpoint.save_file = checkpoint.save_file, die_on_the_second_checkpoint
model, train, corpus, out = sys.argv[1:]
loop.train(ModelConfig(**json.loads(model)), TrainConfig(**json.loads(train)), Corpus.open(corpus), out)
"""


def test_a_run_killed_while_it_writes_a_checkpoint_ends_bitwise_as_the_straight_run(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of
):
    train(model_config, train_config, corpus, tmp_path / "straight")
    out = tmp_path / "killed"
    configs = [json.dumps(dataclasses.asdict(config)) for config in (model_config, train_config)]
    script = [sys.executable, "-c", KILLED_WHILE_SAVING_STEP_8, *configs, corpus.folder, out]
    assert subprocess.run(script).returncode == -signal.SIGKILL
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert [name.startswith(".unfinished-") for name in names] == [True, False]
    assert rows_of(out)[-1]["step"] == 7  # beyond the checkpoint it will resume from

    train(model_config, train_config, corpus, out)
    assert torch.equal(weights_of(out), weights_of(tmp_path / "straight"))
    assert rows_of(out) == rows_of(tmp_path / "straight")
    assert not list(out.rglob(".*"))


def test_the_best_weights_are_kept_though_their_checkpoint_is_long_gone(
    model_config, train_config, corpus, tmp_path, rows_of
):
    # A rate that grows far too high: the validation loss falls, then rises.
    config = dataclasses.replace(
        train_config, steps=8, eval_every=2, save_every=3, keep_last=1, learning_rate=0.3, warmup_steps=23
    )
    train(model_config, config, corpus, tmp_path / "run")
    losses = {row["step"]: row["val/loss"] for row in rows_of(tmp_path / "run") if row.get("val/loss") and row["step"]}
    best_step = min(losses, key=losses.__getitem__)
    assert best_step < 8, losses
    best = open_checkpoint(tmp_path / "run" / "best")
    assert (best.step, best.state["val_loss"]) == (best_step, losses[best_step])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000008"]
    held_out = ValidationWindows(corpus, 2, 32, 4)
    assert evaluate(load_model(best.folder), held_out, corpus.tokenizer.token_bytes).loss == losses[best_step]


def test_a_run_that_goes_on_keeps_the_best_of_its_earlier_part(model_config, train_config, corpus, tmp_path):
    train(model_config, train_config, corpus, tmp_path / "run")
    best = tmp_path / "run" / "best" / "training.json"
    state = json.loads(best.read_text())
    best.write_text(json.dumps({**state, "val_loss": 0.5}))
    train(model_config, dataclasses.replace(train_config, steps=14), corpus, tmp_path / "run")
    assert json.loads(best.read_text())["val_loss"] == 0.5
    best.write_text("damaged")
    train(model_config, dataclasses.replace(train_config, steps=16), corpus, tmp_path / "run")
    assert open_checkpoint(best.parent).step in (15, 16), "damaged weights are none"


def test_no_best_weights_are_kept_where_they_are_not_wanted(model_config, train_config, corpus, tmp_path):
    train(model_config, dataclasses.replace(train_config, keep_best=False), corpus, tmp_path / "run")
    assert not (tmp_path / "run" / "best").exists()


def test_a_finished_run_that_is_given_more_steps_goes_on(model_config, train_config, corpus, tmp_path, rows_of):
    train(model_config, train_config, corpus, tmp_path / "run")
    train(model_config, dataclasses.replace(train_config, steps=12), corpus, tmp_path / "run")
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(13))


def test_a_finished_run_is_left_as_it_is(model_config, train_config, corpus, tmp_path, rows_of, weights_of):
    first = train(model_config, train_config, corpus, tmp_path / "run")
    rows, weights = rows_of(tmp_path / "run"), weights_of(tmp_path / "run")
    assert train(model_config, train_config, corpus, tmp_path / "run") == first
    assert rows_of(tmp_path / "run") == rows
    assert torch.equal(weights_of(tmp_path / "run"), weights)


def test_a_damaged_newest_checkpoint_is_skipped_with_a_line_and_the_run_ends_the_same(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of
):
    train(model_config, train_config, corpus, tmp_path / "run")
    rows, weights = rows_of(tmp_path / "run"), weights_of(tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "step-00000010" / "training.safetensors"
    os.truncate(damaged, damaged.stat().st_size // 2)

    notes: list[str] = []
    reporter = Reporter()
    reporter.note = notes.append
    train(model_config, train_config, corpus, tmp_path / "run", reporter)
    notes = [note for note in notes if not note.startswith("memory: ")]
    assert len(notes) == 2
    assert str(damaged) in notes[0]
    assert "resuming" in notes[1]
    assert "at step 8" in notes[1]
    assert torch.equal(weights_of(tmp_path / "run"), weights)
    assert rows_of(tmp_path / "run") == rows


# Refusals


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("train", "learning_rate", 2e-3), ("train", "seed", 8), ("train", "batch_size", 4), ("model", "d_ff", 32)],
)
def test_resuming_with_another_setting_is_refused_by_name(
    model_config, train_config, corpus, tmp_path, part, name, value
):
    train(model_config, train_config, corpus, tmp_path / "run")
    configs: dict = {"model": model_config, "train": train_config}
    was = getattr(configs[part], name)
    configs[part] = dataclasses.replace(configs[part], **{name: value})
    with pytest.raises(ClockhandError, match=f"^{name} = {value} but the run in .* was started with {was}; give"):
        train(configs["model"], configs["train"], corpus, tmp_path / "run")


def test_fewer_steps_than_have_been_made_are_refused(model_config, train_config, corpus, tmp_path):
    train(model_config, train_config, corpus, tmp_path / "run")
    with pytest.raises(ClockhandError, match=r"^steps = 5 but the run in .* has already made 10"):
        train(model_config, dataclasses.replace(train_config, steps=5), corpus, tmp_path / "run")


def test_a_full_disk_stops_the_run_and_with_room_again_it_ends_as_the_straight_run(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of, monkeypatch
):
    train(model_config, train_config, corpus, tmp_path / "straight")
    out = tmp_path / "full"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", disk_that_is_full_after_one_checkpoint())
        with pytest.raises(ClockhandError, match="step-00000008': No space left on device"):
            train(model_config, train_config, corpus, out)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000004"]
    train(model_config, train_config, corpus, out)
    assert torch.equal(weights_of(out), weights_of(tmp_path / "straight"))
    assert rows_of(out) == rows_of(tmp_path / "straight")


FULL_FROM_STEP_6_ON = """
import json, resource, signal, sys
import torch
torch.set_num_threads(1)
from clockhand.config import ModelConfig
from clockhand.data.shards import Corpus
from clockhand import lock
from clockhand.errors import ClockhandError
from clockhand.train import loop
from clockhand.train.config import TrainConfig
from clockhand.train.progress import Reporter

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write then fails like any that the disk refuses

class Fills(Reporter):
    def row(self, row):
        if row["step"] == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

model, train, corpus, out = sys.argv[1:]
try:
    loop.train(ModelConfig(**json.loads(model)), TrainConfig(**json.loads(train)), Corpus.open(corpus), out, Fills())
except ClockhandError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on files there")
def test_a_write_that_the_system_itself_refuses_leaves_the_last_checkpoint_and_the_run_goes_on_later(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of
):
    train(model_config, train_config, corpus, tmp_path / "straight")
    out = tmp_path / "full"
    configs = [json.dumps(dataclasses.asdict(config)) for config in (model_config, train_config)]
    script = [sys.executable, "-c", FULL_FROM_STEP_6_ON, *configs, corpus.folder, out]
    said = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert said.startswith("cannot write"), said
    assert "what was there before is whole" in said
    assert open_checkpoint(out / "checkpoints" / "step-00000004").step == 4
    assert open_checkpoint(out / "best").step == 6
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000004"]
    train(model_config, train_config, corpus, out)
    assert torch.equal(weights_of(out), weights_of(tmp_path / "straight"))
    assert rows_of(out) == rows_of(tmp_path / "straight")


def disk_that_is_full_after_one_checkpoint():
    saved = []

    def save_file(tensors, path) -> None:
        if saved:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        saved.append(path)
        safetensors.torch.save_file(tensors, path)

    return save_file


def test_resuming_with_other_data_is_refused(model_config, train_config, corpus, tmp_path):
    train(model_config, train_config, corpus, tmp_path / "run")
    (tmp_path / "other.txt").write_text("1 and 1 are 2.\n" * 100)
    other = prepare(CorpusSettings(sources=(str(tmp_path / "other.txt"),), kind="byte"), tmp_path / "corpus")
    with pytest.raises(ClockhandError, match="was started with other data"):
        train(model_config, train_config, other, tmp_path / "run")


def test_resume_never_refuses_a_run_and_must_a_folder_without_one(model_config, train_config, corpus, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ClockhandError, match=r"^--resume must, but .* holds no checkpoint"):
        train(model_config, train_config, corpus, out, resume="must")
    assert not out.exists()
    train(model_config, train_config, corpus, out, resume="never")
    before = (out / "log.jsonl").read_bytes()
    with pytest.raises(ClockhandError, match=r"^--resume never, but .* holds a run"):
        train(model_config, dataclasses.replace(train_config, steps=12), corpus, out, resume="never")
    assert (out / "log.jsonl").read_bytes() == before
    train(model_config, dataclasses.replace(train_config, steps=12), corpus, out, resume="must")
    for folder in (out / "checkpoints").iterdir():
        (folder / "training.json").write_text("damaged")
    with pytest.raises(ClockhandError, match=r"^--resume must, but no checkpoint .* is whole"):
        train(model_config, train_config, corpus, out, resume="must")
    with pytest.raises(ClockhandError, match=r"^--resume maybe must be auto \| never \| must"):
        train(model_config, train_config, corpus, out, resume="maybe")


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(model_config, train_config, corpus, tmp_path):
    train(model_config, train_config, corpus, tmp_path / "run")
    model_folder, letters = tmp_path / "run" / "final", tmp_path / "letters"
    letters.mkdir()
    (letters / "dear.txt").write_text("Dear")
    for folder in (model_folder, letters):
        before = sorted(folder.iterdir())
        with pytest.raises(ClockhandError, match=f"{folder.name} holds other things than a training run"):
            train(model_config, train_config, corpus, folder)
        assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("content", ["null", "5", '"train"', '["train"]', "{", ""])
def test_a_folder_whose_config_is_not_ours_is_no_run_folder(model_config, train_config, corpus, tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ClockhandError, match="holds other things than a training run"):
        train(model_config, train_config, corpus, tmp_path)


def test_a_folder_that_has_only_its_corpus_yet_is_a_run_folder(model_config, train_config, corpus, tmp_path):
    (tmp_path / "run" / "corpus").mkdir(parents=True)
    train(model_config, train_config, corpus, tmp_path / "run")
    assert (tmp_path / "run" / "final").is_dir()


def test_windows_longer_than_the_model_reaches_are_refused(model_config, train_config, corpus, tmp_path):
    with pytest.raises(ClockhandError, match=r"^seq_len = 128 must be at most max_seq_len = 64"):
        train(model_config, dataclasses.replace(train_config, seq_len=128), corpus, tmp_path / "run")


def test_a_step_of_more_than_an_epoch_is_refused_before_a_folder_is_made(model_config, train_config, corpus, tmp_path):
    windows = TrainWindows(corpus, 2, 32).windows_per_epoch
    most = math.ceil(windows / 2)
    for accumulate in (most + 1, 10_000_000):
        config = dataclasses.replace(train_config, accumulate=accumulate)
        refusal = rf"^accumulate = {accumulate} must be at most {most}: .* each of the corpus's {windows} windows of"
        with pytest.raises(ClockhandError, match=refusal):
            train(model_config, config, corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    Trainer(model_config, dataclasses.replace(train_config, accumulate=most), corpus, tmp_path / "most", Reporter())
    # One micro-batch may have more rows than the corpus has windows: of a few lines there are no more.
    many = dataclasses.replace(train_config, batch_size=2 * windows, accumulate=1)
    Trainer(model_config, many, corpus, tmp_path / "rows", Reporter())


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(train_config, corpus, tmp_path):
    small = ModelConfig(vocab_size=100, d_model=32, n_layers=1, n_heads=4, d_ff=64, max_seq_len=64)
    with pytest.raises(ClockhandError, match=r"^vocab_size = 100 must be at least 261"):
        train(small, train_config, corpus, tmp_path / "run")


def test_a_run_that_is_refused_leaves_its_folder_free(model_config, train_config, corpus, tmp_path):
    train(model_config, train_config, corpus, tmp_path)
    with pytest.raises(ClockhandError, match="learning_rate"):
        train(model_config, dataclasses.replace(train_config, learning_rate=0.5), corpus, tmp_path)
    assert not lock.is_held(tmp_path / ".lock")


def test_a_warm_up_of_its_own_is_refused_at_a_resume_and_one_that_follows_the_steps_is_not(
    model_config, train_config, corpus, tmp_path
):
    """It gave another curve in silence."""
    train(model_config, train_config, corpus, tmp_path / "own")
    with pytest.raises(ClockhandError, match=r"warmup_steps = 3 but the run in .* was started with 2"):
        train(model_config, dataclasses.replace(train_config, warmup_steps=3), corpus, tmp_path / "own")
    with pytest.raises(ClockhandError, match=r"warmup_steps = 1 but the run in .* was started with 2"):
        train(model_config, dataclasses.replace(train_config, warmup_steps=AUTO), corpus, tmp_path / "own")
    follows = dataclasses.replace(train_config, warmup_steps=AUTO)
    train(model_config, follows, corpus, tmp_path / "follows")
    train(model_config, dataclasses.replace(follows, steps=20, warmup_steps=AUTO), corpus, tmp_path / "follows")
