"""`auto` is settled once in a run, by measuring, and then stays."""

import dataclasses
import json

import pytest
import torch

from clockhand.errors import ClockhandError
from clockhand.presets import build
from clockhand.train import settle as settling
from clockhand.train.config import TrainConfig
from clockhand.train.loop import Trainer, train
from clockhand.train.parallel import Ranks
from clockhand.train.progress import Reporter
from clockhand.train.settle import matmul_flops, settle

CPU = torch.device("cpu")
MINI = build("mini-llama")


def machine(monkeypatch, fp32: float, bf16: float, compiler: bool = True) -> None:
    """A machine with these FLOP/s."""
    speeds = {torch.float32: fp32, torch.bfloat16: bf16}
    monkeypatch.setattr(settling, "matmul_flops", lambda dtype, device: speeds[dtype])
    monkeypatch.setattr(settling, "can_compile", lambda device: compiler)


def test_bf16_is_chosen_where_its_products_are_much_faster_and_only_there(monkeypatch):
    machine(monkeypatch, 2e11, 4.4e11)
    assert settle(TrainConfig(), MINI, CPU).dtype == "bfloat16"
    machine(monkeypatch, 2e11, 2.2e11)
    assert settle(TrainConfig(), MINI, CPU).dtype == "float32"


def test_a_narrow_model_stays_in_fp32_unless_it_is_compiled(monkeypatch):
    machine(monkeypatch, 2e11, 8e11)
    narrow = dataclasses.replace(MINI, d_model=128)
    assert settle(TrainConfig(compile="off"), narrow, CPU).dtype == "float32"
    assert settle(TrainConfig(compile="on"), narrow, CPU).dtype == "bfloat16"


def test_a_run_is_compiled_if_it_is_long_enough_to_repay_that(monkeypatch):
    machine(monkeypatch, 2e11, 4.4e11)
    assert settle(TrainConfig(steps=1000, seq_len=512), MINI, CPU).compile == "on"
    assert settle(TrainConfig(steps=10, seq_len=512), MINI, CPU).compile == "off"
    machine(monkeypatch, 2e11, 4.4e11, compiler=False)
    assert settle(TrainConfig(steps=1000, seq_len=512), MINI, CPU).compile == "off"


def test_what_is_said_outright_is_not_measured(monkeypatch):
    monkeypatch.setattr(settling, "matmul_flops", None)
    config = TrainConfig(dtype="float32", compile="off")
    assert settle(config, MINI, CPU) == config


def test_a_resumed_run_keeps_what_it_was_settled_to_on_whatever_machine(monkeypatch):
    machine(monkeypatch, 2e11, 2e11)
    earlier = {"dtype": "bfloat16", "compile": "on"}
    again = settle(TrainConfig(), MINI, CPU, earlier=earlier)
    assert (again.dtype, again.compile) == ("bfloat16", "on")


def test_the_run_folder_says_what_auto_became(model_config, train_config, corpus, tmp_path):
    train(model_config, train_config, corpus, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
    assert (written["dtype"], written["compile"]) == ("float32", "off")


def test_measured_products_are_those_of_a_computer():
    assert 1e8 < matmul_flops(torch.float32, CPU) < 1e15


@pytest.mark.slow
def test_a_compiled_run_learns_as_the_plain_one_and_resumes_bit_for_bit(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of
):
    config = dataclasses.replace(train_config, compile="on", dtype="float32")  # auto would be bf16 in one of them
    plain_model = dataclasses.replace(
        model_config, dropout=0.0
    )  # the compiler draws dropout from a generator of its own
    train(plain_model, dataclasses.replace(config, compile="off"), corpus, tmp_path / "plain")
    train(plain_model, config, corpus, tmp_path / "compiled")
    for ours, theirs in zip(rows_of(tmp_path / "compiled"), rows_of(tmp_path / "plain")):
        assert ours.get("train/loss", 0) == pytest.approx(theirs.get("train/loss", 0), abs=1e-4)

    train(model_config, config, corpus, tmp_path / "straight")

    class Stop(Exception):
        pass

    from clockhand.train.progress import Reporter

    class StopAt5(Reporter):
        def row(self, row) -> None:
            if row["step"] == 5:
                raise Stop

    with pytest.raises(Stop):
        train(model_config, config, corpus, tmp_path / "broken", StopAt5())
    train(model_config, config, corpus, tmp_path / "broken")
    assert torch.equal(weights_of(tmp_path / "broken"), weights_of(tmp_path / "straight"))


def test_a_compiled_run_does_not_go_on_sliced(model_config, train_config, corpus, tmp_path):
    """That it is compiled stands nowhere in the command: it was settled by the processes before."""
    out = tmp_path / "run"
    train(model_config, train_config, corpus, out)
    for file in (*out.glob("checkpoints/*/training.json"), out / "config.json"):
        file.write_text(file.read_text().replace('"compile": "off"', '"compile": "on"'))
    with pytest.raises(ClockhandError, match="compile = 'on' is not possible with parallel = 'fsdp'"):
        Trainer(model_config, train_config, corpus, out, Reporter(), Ranks(mode="fsdp"))
