"""Compiled blocks with what else a run may be made of: Muon, experts, bad steps."""

import dataclasses
import math

import pytest
import torch

from clockhand.train.bad_step import replay
from clockhand.train.loop import Trainer, train
from clockhand.train.progress import Reporter

pytestmark = pytest.mark.slow  # compiling a block takes seconds

KINDS = {"dense": {}, "experts": dict(n_experts=4, n_experts_per_token=2)}


@pytest.fixture
def compiled(model_config, train_config):
    """Configs of a compiled run under Muon, without dropout: the compiler draws it from a generator of its own."""

    def make(kind: str = "dense", **settings):
        model = dataclasses.replace(model_config, dropout=0.0, **KINDS[kind])
        return model, dataclasses.replace(train_config, compile="on", optimizer="muon", **settings)

    return make


@pytest.mark.parametrize(("kind", "dtype"), [("dense", "float32"), ("experts", "float32"), ("experts", "bfloat16")])
def test_a_compiled_run_under_muon_learns_as_the_plain_one(kind, dtype, compiled, corpus, tmp_path, rows_of):
    model, config = compiled(kind, dtype=dtype)
    train(model, config, corpus, tmp_path / "compiled")
    train(model, dataclasses.replace(config, compile="off"), corpus, tmp_path / "plain")
    # bf16 rounds in other places once chains are fused: 2^-9 of a loss of 6, and ten steps of it.
    within = 1e-4 if dtype == "float32" else 0.05
    for ours, theirs in zip(rows_of(tmp_path / "compiled"), rows_of(tmp_path / "plain"), strict=True):
        assert ours.get("train/loss", 0) == pytest.approx(theirs.get("train/loss", 0), abs=within)


def test_a_compiled_step_that_went_wrong_under_muon_is_skipped_kept_and_found_again(compiled, corpus, tmp_path):
    model, config = compiled(warmup_steps=0, steps=200)
    run = Trainer(model, config, corpus, tmp_path / "run", Reporter())
    for _ in range(2):
        run.update()
        run.step += 1
    healthy = run.model.blocks[1].mlp_norm.weight.detach().clone()
    with torch.no_grad():
        run.model.blocks[1].mlp_norm.weight[3] = math.nan
    before = [p.detach().clone() for p in run.model.parameters()]
    memory = [each.clone() for state in run.optimizer.state.values() for each in state.values()]
    row = run.update()
    assert row["train/trouble"] == "loss nan"
    assert row["train/skipped"] is True
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, run.model.parameters()))
    after = [each for state in run.optimizer.state.values() for each in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(memory, after)), "a skipped step leaves no trace in the momentum"
    (file,) = (run.out / "bad-steps").iterdir()
    found = replay(file)
    assert found.first == "blocks.1.mlp_norm"
    with torch.no_grad():
        run.model.blocks[1].mlp_norm.weight.copy_(healthy)
    run.step += 1
    assert run.update().get("train/skipped") is None, "and the run goes on"
