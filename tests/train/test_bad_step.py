"""A step that went wrong is kept, and running it again finds where."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from clockhand.data.loader import Batch
from clockhand.errors import ClockhandError
from clockhand.train.bad_step import open_bad_step, replay
from clockhand.train.log import read_log
from clockhand.train.loop import Trainer, step_seed, train
from clockhand.train.progress import Reporter


@pytest.fixture
def trainer(model_config, train_config, corpus, tmp_path):
    def make(model: dict | None = None, **settings) -> Trainer:
        fields = {"warmup_steps": 0, "steps": 200, **settings}
        config = dataclasses.replace(train_config, **fields)
        made = Trainer(dataclasses.replace(model_config, **(model or {})), config, corpus, tmp_path / "run", Reporter())
        made.notes = []
        made.reporter.note = made.notes.append
        return made

    return make


def take(trainer: Trainer, steps: int) -> list[dict]:
    rows = []
    for _ in range(steps):
        rows.append(trainer.update())
        trainer.step += 1
    return rows


def kept(trainer: Trainer) -> list:
    return sorted((trainer.out / "bad-steps").glob("*"))


def spoil(trainer: Trainer, name: str, value: float = math.nan) -> None:
    with torch.no_grad():
        trainer.model.get_parameter(name).view(-1)[3] = value


@pytest.mark.parametrize(
    ("parameter", "first"),
    [
        ("blocks.1.mlp.up_proj.weight", "blocks.1.mlp.up_proj"),
        ("blocks.0.attention.k_proj.weight", "blocks.0.attention.k_proj"),
        ("final_norm.weight", "final_norm"),
    ],
)
def test_the_first_layer_that_puts_out_no_number_is_named(trainer, parameter, first):
    run = trainer()
    take(run, 2)
    spoil(run, parameter)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    row = run.update()
    assert row["train/skipped"] is True
    assert row["train/trouble"] == "loss nan"
    for name, parameter_now in run.model.named_parameters():
        assert torch.equal(parameter_now.nan_to_num(), before[name].nan_to_num()), f"{name} has moved"
    (file,) = kept(run)
    assert f"--replay {file}" in run.notes[0]
    found = replay(file)
    assert found.first == first
    assert "weight holds 1 values that are no number" in found.how
    assert math.isnan(found.loss)


def test_a_step_in_which_an_expert_had_no_tokens_is_run_again_too(trainer):
    run = trainer({"n_experts": 4, "n_experts_per_token": 1})
    ids = torch.full((2, 32), 5)  # one id over and over goes to few of the four
    run.windows.batch = lambda number: Batch(ids, ids.clone(), None)
    spoil(run, "final_norm.weight")
    run.update()
    found = replay(*kept(run))
    assert found.first == "final_norm"


def test_an_overflow_between_two_modules_is_placed_by_the_first_that_is_given_it(trainer):
    run = trainer({"norm_position": "pre"})
    with torch.no_grad():  # each of gate and up is a number; only their product is none
        run.model.blocks[1].mlp.gate_proj.weight.mul_(1e25)
        run.model.blocks[1].mlp.up_proj.weight.mul_(1e25)
    run.update()
    found = replay(*kept(run))
    assert found.first == "blocks.1.mlp.down_proj"
    assert "what it is given is no number" in found.how


def test_a_gradient_that_is_no_number_behind_a_loss_that_is_one_is_placed_in_the_backward_pass(trainer):
    run = trainer({"tie_embeddings": False}, clip_norm=0.0)
    with torch.no_grad():  # the logits are small, what comes back through the head is not
        run.model.final_norm.weight.fill_(1e-38)
        run.model.lm_head.weight.fill_(3e38).mul_(torch.arange(run.model.config.vocab_size)[:, None] % 2 * 2 - 1)
        run.model.blocks[1].mlp.down_proj.weight.mul_(1e-3)
    row = run.update()
    assert math.isfinite(row["train/loss"])
    assert not math.isfinite(row["train/grad_norm"])
    found = replay(*kept(run))
    assert math.isfinite(found.loss)
    assert found.how.startswith("backward")


def test_a_step_is_run_again_to_the_bit_with_dropout_and_documents_after_the_run_folder_is_gone(trainer, tmp_path):
    run = trainer()
    assert run.model.config.dropout > 0
    take(run, 30)
    batch = run.windows.batch(0)
    documents = torch.arange(32).repeat(2, 1) // 10
    odd = Batch(batch.ids, batch.targets.flip(1), documents)
    run.windows.batch = lambda number: odd
    with torch.no_grad():
        run.model.lm_head.weight.mul_(100)
    row = run.update()
    assert row["train/trouble"].startswith(("loss", "gradient norm"))
    assert row["train/skipped"] is False, "a spike is applied unless --skip-spikes"
    file = shutil.copy(kept(run)[0], tmp_path / "elsewhere.safetensors")
    shutil.rmtree(run.out)
    found = replay(file)
    assert (found.loss, found.norm) == (row["train/loss"], row["train/grad_norm"])
    record, _, batches = open_bad_step(file)
    assert record["step_seed"] == step_seed(7, 30)
    assert torch.equal(batches[1].documents, documents)
    assert found.first, "all is finite: then the gradient furthest above its usual one"
    assert "times its usual one" in found.how


def test_control_another_seed_of_the_step_is_another_loss(trainer, monkeypatch):
    run = trainer()
    spoil(run, "final_norm.weight")
    run.update()
    healed = open_bad_step(kept(run)[0])
    healed[1].final_norm.weight.data.nan_to_num_(1.0)
    monkeypatch.setattr("clockhand.train.bad_step.open_bad_step", lambda file: healed)
    losses = []
    for seed in (1, 2, 1):
        healed[0]["step_seed"] = seed
        losses.append(replay(kept(run)[0]).loss)
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("skip", [True, False])
def test_a_spike_is_applied_unless_asked_to_skip_it(trainer, skip):
    run = trainer(skip_spikes=skip, clip_norm=0.0)
    take(run, 20)
    before = [p.detach().clone() for p in run.model.parameters()]
    batches = run.windows.batch
    run.windows.batch = lambda number: dataclasses.replace(
        batches(number), targets=torch.full_like(batches(number).targets, run.model.config.vocab_size - 1)
    )
    row = run.update()
    assert "usually" in row["train/trouble"]
    assert row["train/skipped"] is skip
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters())) is skip


def test_only_the_first_of_a_streak_is_kept_and_of_those_the_last_few(trainer):
    run = trainer(keep_bad_steps=2)
    for step in (0, 1, 50, 100, 101, 199):
        run.step = step
        healthy = run.model.final_norm.weight.detach().clone()
        if step != 50:  # one good step, or the run would stop after five bad ones
            spoil(run, "final_norm.weight")
        run.update()
        with torch.no_grad():
            run.model.final_norm.weight.copy_(healthy)
    assert [file.name for file in kept(run)] == ["step-00000100.safetensors", "step-00000199.safetensors"]


def test_none_are_kept_where_none_are_wanted(trainer):
    run = trainer(keep_bad_steps=0)
    spoil(run, "final_norm.weight")
    assert run.update()["train/skipped"] is True
    assert not (run.out / "bad-steps").exists()


def test_a_disk_without_room_for_it_does_not_stop_the_run(trainer, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clockhand.train.bad_step.save_file", full)
    run = trainer()
    spoil(run, "final_norm.weight")
    run.update()
    assert "No space left on device" in run.notes[0]
    assert kept(run) == []


def test_what_was_normal_of_each_parameter_is_in_the_record(trainer):
    run = trainer()
    take(run, 20)
    spoil(run, "blocks.0.mlp.gate_proj.weight")
    run.update()
    parameters = open_bad_step(kept(run)[0])[0]["parameters"]
    assert parameters.keys() == dict(run.model.named_parameters()).keys()
    spoiled = parameters.pop("blocks.0.mlp.gate_proj.weight")
    assert spoiled["weight"] == "nan"
    for name, norms in parameters.items():
        # Twenty steps of gradients clipped to 1 together.
        assert 0 < norms["usual_gradient"] < 1, name
        assert norms["weight"] > 0
        assert norms["gradient"] == "nan"


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b'{"a": 1}'])
def test_a_file_that_is_none_of_ours_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ClockhandError, match=r"file' is no bad step"):
        replay(tmp_path / "file")
    with pytest.raises(ClockhandError, match=r"^cannot read .*nowhere': [Nn]o such file[^/]*$"):
        replay(tmp_path / "nowhere")


def edited(file, **changes):
    """The same bad step with some parts of its record otherwise; None takes one out."""
    record = open_bad_step(file)[0]
    record = {name: value for name, value in {**record, **changes}.items() if value is not None}
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no dict
    save_file(tensors, file, {"record": json.dumps(record)})


@pytest.mark.parametrize(
    "changes",
    [{"skipped": None}, {"ranks": None}, {"finite": None}, {"loss": "long"}, {"dtype": "float8"}, {"step_seed": -1},
     {"step_seed": "1"}, {"parameters": {}}, {"parameters": []}, {"micro_batches": 0}, {"micro_batches": 9},
     {"model": []}],
    ids=str,
)  # fmt: skip
def test_a_bad_step_whose_record_is_damaged_is_refused_in_one_line(trainer, changes):
    run = trainer()
    spoil(run, "blocks.0.mlp.gate_proj.weight")
    take(run, 1)
    (file,) = kept(run)
    edited(file)
    assert replay(file).first  # control: written again as it was, it is read
    edited(file, **changes)
    with pytest.raises(ClockhandError, match=r"safetensors' is no bad step|^model = |must be"):
        replay(file)


def test_a_bad_step_with_ids_beyond_the_vocabulary_is_refused(trainer, model_config):
    run = trainer()
    spoil(run, "blocks.0.mlp.gate_proj.weight")
    take(run, 1)
    (file,) = kept(run)
    with safe_open(file, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - no dict
        record = stored.metadata()
    tensors["batch/0/ids"][0, 0] = model_config.vocab_size
    save_file(tensors, file, record)
    with pytest.raises(ClockhandError, match=r"safetensors' is no bad step"):
        replay(file)


def test_a_run_that_skips_spikes_and_was_killed_in_a_streak_goes_on_as_the_straight_one(
    model_config, train_config, corpus, tmp_path, rows_of, weights_of, monkeypatch
):
    """The judgement of a step is a function of the log, so it survives the process."""
    monkeypatch.setattr("clockhand.train.spikes.FEWEST", 4)
    monkeypatch.setattr("clockhand.train.spikes.TIMES", 1.0)
    monkeypatch.setattr("clockhand.train.spikes.DEVIATIONS", 0.7)  # so that many a usual step is a spike
    config = dataclasses.replace(train_config, steps=24, skip_spikes=True, learning_rate=1e-5)
    train(model_config, config, corpus, tmp_path / "straight")
    rows = rows_of(tmp_path / "straight")
    assert 3 <= sum(row.get("train/skipped", False) for row in rows) <= 20

    class Dies(Reporter):
        def row(self, row) -> None:
            if row["step"] == 14:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model_config, config, corpus, tmp_path / "killed", Dies())
    train(model_config, config, corpus, tmp_path / "killed")
    assert rows_of(tmp_path / "killed") == rows
    assert torch.equal(weights_of(tmp_path / "killed"), weights_of(tmp_path / "straight"))
    assert json.dumps(read_log(tmp_path / "killed" / "log.jsonl")[14].get("train/trouble"))


def test_the_gradients_in_a_record_are_those_before_clipping(trainer):
    run = trainer(clip_norm=1e-3)
    take(run, 20)
    batches = run.windows.batch
    run.windows.batch = lambda number: dataclasses.replace(
        batches(number), targets=torch.full_like(batches(number).targets, run.model.config.vocab_size - 1)
    )
    row = run.update()
    assert "usually" in row["train/trouble"]
    parameters = open_bad_step(kept(run)[0])[0]["parameters"]
    whole = math.hypot(*(norms["gradient"] for norms in parameters.values()))
    assert whole == pytest.approx(row["train/grad_norm"], rel=1e-4)
    assert whole > 100 * run.config.clip_norm
