"""Several processes and one run: the same numbers as one process alone, and an end where one of them dies."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from clockhand.config import ModelConfig
from clockhand.data.loader import IGNORE_INDEX, Batch
from clockhand.errors import ClockhandError
from clockhand.interop.hf import load_model
from clockhand.model.transformer import Transformer
from clockhand.train.bad_step import parameter_norms, replay
from clockhand.train.config import TrainConfig
from clockhand.train.log import read_log
from clockhand.train.loop import Trainer, train
from clockhand.train.parallel import Ranks, meeting, settle_mode
from clockhand.train.progress import Reporter

LIMIT_S = 120  # of a whole test: what takes longer hangs


@pytest.fixture
def plain(model_config) -> ModelConfig:
    """Without dropout, which every rank draws for itself."""
    return dataclasses.replace(model_config, dropout=0.0)


@pytest.fixture
def on_ranks(tmp_path):
    """Runs `work(ranks)` in processes of their own, one per rank, and returns what each of them returned."""

    def run(work, size: int = 2, mode: str = "ddp") -> list:
        # A forked process has torch already, and tests have one thread, which is what survives a fork.
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()
        meeting_place = str(tmp_path / f"store-{time.monotonic_ns()}")

        def one(rank: int) -> None:
            try:
                with meeting(dist.FileStore(meeting_place, size), rank, size, mode) as ranks:
                    answers.put((rank, work(ranks)))
            except BaseException as error:
                answers.put((rank, error))

        processes = [context.Process(target=one, args=(rank,)) for rank in range(size)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_S
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        for process in processes:
            if process.is_alive():
                process.kill()
                pytest.fail("a rank hangs")
        found = {}
        while not answers.empty():
            rank, answer = answers.get()
            if isinstance(answer, BaseException):
                raise answer
            found[rank] = answer
        return [found[rank] for rank in range(size)]

    return run


def curve(out: Path) -> list[float]:
    return [row[key] for row in read_log(out / "log.jsonl") for key in ("val/loss", "train/loss") if key in row]


def vector(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# The same run


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_ranks_have_the_loss_curve_of_one_process(
    mode, plain, train_config, corpus, tmp_path, on_ranks, weights_of
):
    alone = train(plain, train_config, corpus, tmp_path / "alone")
    work = lambda ranks: train(plain, train_config, corpus, tmp_path / "two", ranks=ranks)  # noqa: E731
    evaluations = on_ranks(work, mode=mode)
    assert evaluations[0] == evaluations[1]
    assert evaluations[0].loss == pytest.approx(alone.loss, abs=1e-5)
    # The order in which gradients are summed is another, and Adam divides by what may be small: 1e-5 after 10 steps.
    assert curve(tmp_path / "two") == pytest.approx(curve(tmp_path / "alone"), abs=1e-5)
    assert torch.allclose(weights_of(tmp_path / "two"), weights_of(tmp_path / "alone"), rtol=0, atol=2e-5)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_initial_weights_do_not_depend_on_the_ranks(mode, tied, plain, train_config, on_ranks):
    config = dataclasses.replace(plain, tie_embeddings=tied)
    cpu = torch.device("cpu")
    alone, _ = Ranks().build(config, 3, "float32", cpu)

    def work(ranks):
        model, _ = ranks.build(config, 3, "float32", cpu)
        whole = ranks.whole(model)
        return None if whole is None else torch.equal(vector(whole), vector(alone))

    assert on_ranks(work, mode=mode)[0] is True
    other, _ = Ranks().build(config, 4, "float32", cpu)
    assert not torch.equal(vector(other), vector(alone))


def test_a_rank_of_two_holds_half_of_the_weights_and_of_adams_memory(plain, train_config, corpus, tmp_path, on_ranks):
    def work(ranks):
        trainer = Trainer(plain, train_config, corpus, tmp_path / "run", Reporter(), ranks)
        trainer.update()
        weights = sum(p.to_local().numel() for p in trainer.model.parameters())
        states = trainer.optimizer.state.values()
        return weights, sum(state["exp_avg"].to_local().numel() for state in states)

    whole = sum(p.numel() for p in Transformer(plain).parameters())
    for weights, memory in on_ranks(work, mode="fsdp"):
        assert weights == memory == pytest.approx(whole / 2, rel=0.01)  # a few have odd sizes


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_accumulation_and_unequal_lengths_are_the_same_across_ranks(
    mode, plain, train_config, corpus, tmp_path, on_ranks
):
    torch.manual_seed(1)
    ids = torch.randint(plain.vocab_size, (4, 32))
    targets = ids.roll(-1, 1)
    for row, length in enumerate((31, 2, 17, 5)):
        targets[row, length:] = IGNORE_INDEX

    def update(rows: int, ranks: Ranks):
        class Windows:
            def batch(self, number):
                mine = slice(number * rows, (number + 1) * rows)
                return Batch(ids[mine], targets[mine], None)

        config = dataclasses.replace(train_config, batch_size=rows, accumulate=4 // rows)
        trainer = Trainer(plain, config, corpus, tmp_path / f"rows-{rows}-{ranks.size}", Reporter(), ranks)
        trainer.windows = Windows()
        row = trainer.update()
        return row["train/loss"], row["train/grad_norm"], ranks.whole(trainer.model)

    def same(found) -> bool:
        return found[:2] == pytest.approx((loss, norm), rel=1e-5) and (
            found[2] is None or torch.allclose(vector(found[2]), weights, rtol=0, atol=1e-6)
        )

    loss, norm, model = update(4, Ranks())
    weights = vector(model)
    # One row a micro-batch: one of the two ranks has nothing, and must neither hang nor weigh anything.
    for rows in (1, 2, 4):
        assert on_ranks(lambda ranks: same(update(rows, ranks)), mode=mode) == [True, True]  # noqa: B023


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_step_that_went_wrong_is_skipped_by_all_ranks_and_kept_once_with_whole_weights(
    mode, plain, train_config, corpus, tmp_path, on_ranks
):
    config = dataclasses.replace(train_config, keep_best=False)

    def spoiled(ranks: Ranks):
        trainer = Trainer(plain, config, corpus, tmp_path / "run", Reporter(), ranks)
        trainer.update()  # so that Adam remembers
        trainer.step += 1
        with torch.no_grad():
            trainer.model.blocks[1].mlp_norm.weight.fill_(torch.nan)
        return trainer.update()["train/skipped"]

    assert on_ranks(spoiled, mode=mode) == [True, True]
    (file,) = (tmp_path / "run" / "bad-steps").iterdir()
    found = replay(file)
    assert found.first == "blocks.1.mlp_norm"
    norms = found.record["parameters"]["blocks.0.mlp.up_proj.weight"]
    alone = Trainer(plain, config, corpus, tmp_path / "alone", Reporter())
    alone.update()
    expected = parameter_norms(alone.model, alone.optimizer)["blocks.0.mlp.up_proj.weight"]
    assert norms["weight"] == pytest.approx(expected["weight"], rel=1e-3)
    assert norms["usual_gradient"] == pytest.approx(expected["usual_gradient"], rel=1e-3)


def test_gradients_are_exchanged_once_a_step(plain, train_config, corpus, tmp_path, on_ranks):
    def exchanges(ranks, accumulate: int) -> int:
        config = dataclasses.replace(train_config, accumulate=accumulate)
        trainer = Trainer(plain, config, corpus, tmp_path / f"by-{accumulate}", Reporter(), ranks)
        calls = []

        def hook(state, bucket):
            calls.append(bucket.index())
            return allreduce_hook(None, bucket)

        trainer.loss_of.register_comm_hook(None, hook)
        trainer.update()
        return len(calls)

    once, four = on_ranks(lambda ranks: (exchanges(ranks, 1), exchanges(ranks, 4)))[0]
    assert once == four > 0


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_an_expert_that_one_rank_never_visits_does_not_hang(mode, plain, train_config, corpus, tmp_path, on_ranks):
    moe = dataclasses.replace(plain, n_experts=4, n_experts_per_token=1, balance_coef=0.0)
    row = torch.full((1, 32), 5), torch.full((1, 32), 9)
    ids = torch.cat(row)  # each rank's row is one id over and over: it goes to one expert of the four

    class Windows:
        def batch(self, number):
            return Batch(ids, ids.clone(), None)

    def update(ranks):
        trainer = Trainer(moe, train_config, corpus, tmp_path / f"run-{ranks.size}", Reporter(), ranks)
        trainer.windows = Windows()
        return trainer.update()["train/loss"], trainer.update()["train/loss"]

    alone = update(Ranks())
    assert on_ranks(update, mode=mode) == [pytest.approx(alone, abs=1e-5)] * 2


# Going on


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_run_of_two_ranks_goes_on_with_one_and_with_four(size, mode, plain, train_config, corpus, tmp_path, on_ranks):
    config = dataclasses.replace(train_config, batch_size=4, accumulate=1)
    train(plain, config, corpus, tmp_path / "alone")
    run = tmp_path / "run"

    def half(ranks):
        trainer = Trainer(plain, config, corpus, run, Reporter(), ranks)
        trainer.is_due = lambda every: False
        while trainer.step < 5:
            trainer.log.write({"step": trainer.step} | trainer.update())
            trainer.step += 1
        trainer.save()

    on_ranks(half, mode=mode)
    if size == 1:
        train(plain, config, corpus, run)
    else:
        on_ranks(lambda ranks: train(plain, config, corpus, run, ranks=ranks), size, mode)
    final, straight = read_log(run / "log.jsonl")[-1], read_log(tmp_path / "alone/log.jsonl")[-1]
    assert final["val/loss"] == pytest.approx(straight["val/loss"], abs=1e-5)
    assert torch.allclose(vector(load_model(run / "final")), vector(load_model(tmp_path / "alone/final")), atol=2e-5)


# Ends


def test_a_rank_that_dies_ends_the_others_with_a_line(plain, train_config, corpus, tmp_path, on_ranks):
    def work(ranks):
        trainer = Trainer(plain, train_config, corpus, tmp_path / "run", Reporter(), ranks)
        trainer.update()
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.update()

    with pytest.raises(ClockhandError, match=r"rank 0 of 2 has lost another one.*the same command goes on"):
        on_ranks(work)


TINY = ("d_model=32", "n_layers=1", "n_heads=2", "d_ff=64", "max_seq_len=64")


@pytest.fixture
def torchrun(corpus, tmp_path):
    """Starts `clockhand train` on two ranks, or alone, in a run folder (tmp_path/run) of the tests."""

    def start(*flags: str, ranks: int = 2, out: str = "run") -> subprocess.Popen:
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launch = [sys.executable, *(several if ranks > 1 else []), "-m", "clockhand.cli", "train"]
        folders = ["--data", str(corpus.folder), "--out", str(tmp_path / out)]
        size = [word for field in TINY for word in ("--set", field)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*launch, *folders, *size, "--seq-len", "32", *flags]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    return start


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(row["step"] >= step for row in read_log(out / "log.jsonl")):
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.02)


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    if not children.exists():
        pytest.skip("needs Linux to find the processes of the ranks")
    return [int(child) for child in children.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_run_whose_rank_is_killed_says_so_and_the_same_command_goes_on(killed, torchrun, tmp_path):
    flags = ("--steps", "4000", "--save-every", "10", "--eval-every", "0", "--sample-every", "0")
    launcher = torchrun(*flags)
    wait_for_step(tmp_path / "run", 25)
    os.kill(ranks_of(launcher)[killed], signal.SIGKILL)
    _, said = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode != 0
    assert f"error: rank {1 - killed} of 2 has lost another one" in said
    reached = read_log(tmp_path / "run/log.jsonl")[-1]["step"]

    launcher = torchrun("--steps", str(reached + 5), *flags[2:])
    _, said = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == 0, said
    assert "resuming" in said
    assert [row["step"] for row in read_log(tmp_path / "run/log.jsonl")] == list(range(reached + 6))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_compiled_two_ranks_have_the_loss_curve_of_one_compiled_process(optimizer, torchrun, tmp_path):
    flags = f"--compile on --dtype float32 --optimizer {optimizer} --batch-size 4 --accumulate 2 --steps 10"
    cadence = "--eval-every 5 --save-every 0 --sample-every 0"
    for ranks, out in (2, "two"), (1, "alone"):
        launcher = torchrun(*flags.split(), *cadence.split(), ranks=ranks, out=out)
        _, said = launcher.communicate(timeout=2 * LIMIT_S)
        assert launcher.returncode == 0, said
    two, alone = curve(tmp_path / "two"), curve(tmp_path / "alone")
    assert len(alone) == 10 + 3
    assert two == pytest.approx(alone, abs=1e-5)  # as uncompiled


@pytest.mark.slow
def test_torchrun_asked_to_stop_saves_and_goes_on(torchrun, tmp_path):
    launcher = torchrun("--steps", "4000", "--save-every", "0", "--eval-every", "0", "--parallel", "fsdp")
    wait_for_step(tmp_path / "run", 5)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=LIMIT_S)
    assert "saved at step" in said
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1


def test_all_ranks_stop_when_one_was_asked_to(on_ranks):
    assert on_ranks(lambda ranks: ranks.max(signal.SIGTERM if ranks.rank == 1 else 0)) == [signal.SIGTERM] * 2


def test_only_rank_0_writes_and_talks(plain, train_config, corpus, tmp_path, on_ranks):
    def work(ranks):
        said = []
        reporter = Reporter()
        reporter.row = said.append
        train(plain, dataclasses.replace(train_config, sample_every=5), corpus, tmp_path / "run", reporter, ranks)
        return len(said)

    assert on_ranks(work, mode="fsdp") == [11, 0]
    assert [row["step"] for row in read_log(tmp_path / "run/log.jsonl")] == list(range(11))


def test_what_one_does_for_all_is_done_once(on_ranks, tmp_path):
    def work(ranks):
        return ranks.once(lambda: [ranks.rank, os.getpid()]), ranks.once(lambda: None)

    first, second = on_ranks(work)
    assert first == second
    assert first[0][0] == 0


@pytest.mark.parametrize(
    ("parallel", "launched", "size", "mode"),
    [("auto", False, 1, "none"), ("auto", True, 2, "ddp"), ("fsdp", True, 2, "fsdp"), ("none", True, 1, "none")],
)
def test_the_mode_follows_from_how_the_process_was_started(parallel, launched, size, mode):
    assert settle_mode(parallel, launched, size) == mode


def test_a_mode_that_cannot_be_is_refused():
    with pytest.raises(ClockhandError, match=r"parallel = 'fsdp' needs several processes: torchrun"):
        settle_mode("fsdp", False, 1)
    with pytest.raises(ClockhandError, match=r"parallel = 'none' but torchrun has started 2 processes"):
        settle_mode("none", True, 2)
    with pytest.raises(ClockhandError, match=r"parallel = 'tensor' must be auto \| none \| ddp \| fsdp"):
        TrainConfig(parallel="tensor")
