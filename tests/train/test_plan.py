"""The forecast: its terms against what autograd and the allocator really hold, and a batch cut to fit."""

import dataclasses
import json
import subprocess
import sys

import pytest

from clockhand.cli import main
from clockhand.config import ModelConfig
from clockhand.count import total_parameters
from clockhand.errors import ClockhandError
from clockhand.train.config import TrainConfig
from clockhand.train.optim import optimizer_tensors
from clockhand.train.plan import Speed, fit_micro_batch, forecast_memory, forecast_seconds
from clockhand.train.trial import Trial

SMALL = ModelConfig(vocab_size=500, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=128, max_seq_len=128)
CONFIG = TrainConfig(batch_size=8, accumulate=2, seq_len=64, steps=100, eval_every=0)

STEPS = """
import sys
from clockhand.config import ModelConfig
from clockhand.data.loader import Batch
from clockhand.train.config import TrainConfig
from clockhand.train.loop import make_optimizer
from clockhand.train.parallel import Ranks
from clockhand.train.plan import forecast_memory
from clockhand.memory import count_peak_from_here, peak_resident_bytes
from clockhand.train.recompute import recomputing
import torch

torch.set_num_threads(1)
def steps(model, config):
    network, loss_of = Ranks().build(model, 0, "float32", torch.device("cpu"))
    if config.checkpoint_activations:
        network.run_block = recomputing(network.run_block)
    optimizer = make_optimizer(network, config)
    ids = torch.zeros(config.batch_size, config.seq_len, dtype=torch.int64)
    for _ in range(2):
        loss_of(Batch(ids, ids, None))[0].backward()
        optimizer.step()
        optimizer.zero_grad()

small = dict(vocab_size=64, d_model=32, n_layers=1, n_heads=2, d_ff=64, max_seq_len=512)
steps(ModelConfig(**small), TrainConfig(batch_size=1, seq_len=8))  # loads what is loaded at first use
before = count_peak_from_here()
model = ModelConfig(**(small | dict(vocab_size=4096, d_model=256, n_layers=8, n_heads=4, n_kv_heads=2, d_ff=704)))
config = TrainConfig(batch_size=int(sys.argv[1]), seq_len=256, checkpoint_activations=sys.argv[2] == "True")
steps(model, config)
print((peak_resident_bytes() - before) / forecast_memory(model, config).peak)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("rows", "checkpoint_activations"), [(8, False), (12, True)])
def test_the_peak_of_a_process_is_near_the_forecast(rows, checkpoint_activations):
    flags = [str(rows), str(checkpoint_activations)]
    said = subprocess.run([sys.executable, "-c", STEPS, *flags], capture_output=True, text=True, check=True)
    assert 0.85 < float(said.stdout) < 1.15  # LOG.md's grid is within 10 %


def test_weights_gradients_and_what_adam_remembers_follow_from_the_count():
    memory = forecast_memory(SMALL, CONFIG)
    assert memory.weights == memory.gradients == 4 * total_parameters(SMALL)
    assert memory.optimizer == 8 * total_parameters(SMALL)
    muon = forecast_memory(SMALL, dataclasses.replace(CONFIG, optimizer="muon"))
    matrices = total_parameters(SMALL) - 500 * 64 - (2 * 3 + 1) * 64  # without embeddings and norms
    assert muon.optimizer == memory.optimizer - 4 * matrices


def test_what_muon_remembers_is_what_was_forecast():
    config = dataclasses.replace(CONFIG, optimizer="muon")
    trial = Trial(SMALL, dataclasses.replace(config, dtype="float32", compile="off"))
    trial.step()
    held = sum(each.nbytes for each in optimizer_tensors(trial.model, trial.optimizer).values() if each.dim())
    assert held == forecast_memory(SMALL, config).optimizer


def test_activations_grow_with_blocks_and_rows_and_shrink_with_checkpoints():
    def activations(model: dict | None = None, **settings) -> int:
        model_config = dataclasses.replace(SMALL, **(model or {}))
        return forecast_memory(model_config, dataclasses.replace(CONFIG, **settings)).activations

    assert activations(batch_size=16) == pytest.approx(2 * activations(), rel=0.01)
    assert activations({"n_layers": 6}) == pytest.approx(2 * activations(), rel=0.1)
    assert activations({"n_layers": 12}, checkpoint_activations=True) < 0.3 * activations({"n_layers": 12})
    # Experts that a token does not visit keep nothing of it.
    few, many = ({"n_experts": experts, "n_experts_per_token": 1} for experts in (4, 64))
    assert activations(many) == pytest.approx(activations(few), rel=0.1)


def test_a_batch_cut_to_fit_keeps_the_tokens_of_a_step_and_fits():
    whole = forecast_memory(SMALL, CONFIG).peak
    fitted = fit_micro_batch(SMALL, CONFIG, whole - 1)
    assert fitted.batch_size < CONFIG.batch_size
    assert fitted.tokens_per_step == CONFIG.tokens_per_step
    assert forecast_memory(SMALL, fitted).peak < whole
    assert fit_micro_batch(SMALL, CONFIG, whole) == CONFIG
    with pytest.raises(ClockhandError, match=r"one row of seq_len = 64 needs .* --checkpoint-activations"):
        fit_micro_batch(SMALL, CONFIG, 1_000_000)


def test_the_time_of_a_run_is_its_steps_and_its_evaluations():
    speed = Speed(step=2.0, read=0.5)
    once = forecast_seconds(dataclasses.replace(CONFIG, eval_windows=16), speed)
    assert once == 100 * 2.0 + 2 * 0.5
    # At steps 0, 40, 80 and at the end.
    config = dataclasses.replace(CONFIG, eval_windows=16, eval_every=40)
    assert forecast_seconds(config, speed) == 200 + 4 * 2 * 0.5
    # Resumed at 40 and stopped before the evaluation at 80; resumed there, to the end.
    assert forecast_seconds(config, speed, 40, 80, finished=False) == 80 + 1 * 2 * 0.5
    assert forecast_seconds(config, speed, 80, 100) == 40 + 2 * 2 * 0.5


def test_plan_tells_memory_time_and_tokens(capsys):
    flags = ["--seq-len", "16", "--batch-size", "2", "--steps", "10", "--set", "n_layers=2", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["plan", "tiny", *flags])
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 10 * 2 * 16
    assert found["memory"]["peak"] > found["memory"]["weights"] == 4 * found["parameters"]
    assert found["seconds"] >= 10 * found["seconds_per_step"] > 0
