"""Checkpoints: whole or absent, and never one that cannot be trusted."""

import errno
import json
import os

import pytest
import torch
from safetensors import SafetensorError

from clockhand.disk import remove_leftovers
from clockhand.errors import ClockhandError
from clockhand.model.transformer import Transformer
from clockhand.train import checkpoint as module
from clockhand.train.checkpoint import newest_checkpoint, open_checkpoint, remove_old, restore, save_checkpoint
from clockhand.train.config import TrainConfig
from clockhand.train.optim import make_optimizer, optimizer_tensors

PLAN = {"seconds": 1.0, "model": {}, "train": {}, "data": {"folder": "data", "sha256": "0"}}


@pytest.fixture
def save(model_config, corpus, tmp_path):
    """Saves a model that has been trained a little, under the step given."""
    torch.manual_seed(0)
    model = Transformer(model_config)
    optimizer = make_optimizer(model, TrainConfig())
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()

    def at(step: int):
        memory = optimizer_tensors(model, optimizer)
        return save_checkpoint(tmp_path, model, memory, corpus.tokenizer, {"step": step, **PLAN})

    at.model, at.optimizer = model, optimizer
    return at


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_what_was_saved_comes_back_bit_for_bit(save, model_config, tmp_path):
    folder = save(3)
    checkpoint = newest_checkpoint(tmp_path, pytest.fail)
    assert (checkpoint.folder, checkpoint.step) == (folder, 3)

    model = Transformer(model_config)
    optimizer = make_optimizer(model, TrainConfig())
    restore(checkpoint, model, optimizer)
    for (name, ours), theirs in zip(model.named_parameters(), save.model.parameters()):
        assert torch.equal(ours, theirs), name
    memory, other = optimizer_tensors(model, optimizer), optimizer_tensors(save.model, save.optimizer)
    assert memory.keys() == other.keys()
    assert all(torch.equal(memory[name], other[name]) for name in memory)


def test_a_checkpoint_is_a_model_folder_without_a_pickle(save):
    folder = save(3)
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= set(names(folder))
    assert not [name for name in names(folder) if name.endswith((".pt", ".pth", ".bin", ".pkl"))]


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
def test_a_damaged_file_makes_the_one_before_the_newest_whole_one(save, tmp_path, name, damage):
    save(1)
    path = save(2) / name
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "removed":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    warnings: list[str] = []
    assert newest_checkpoint(tmp_path, warnings.append).step == 1
    assert len(warnings) == 1
    assert str(path) in warnings[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 2}'])
def test_a_damaged_training_json_is_named(save, content):
    path = save(2) / "training.json"
    path.write_text(content)
    with pytest.raises(ClockhandError, match=r"training.json is missing or damaged"):
        open_checkpoint(path.parent)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path / "none", pytest.fail) is None


FULL = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError("I/O error: No space left on device")]


@pytest.mark.parametrize("error", FULL, ids=["OSError", "SafetensorError"])
def test_a_full_disk_stops_with_a_clear_word_and_the_last_checkpoint_whole(save, tmp_path, monkeypatch, error):
    save(1)

    def full(*args):
        raise error

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(ClockhandError, match=r"^cannot write .*step-00000002': .*No space left on device"):
        save(2)
    assert names(tmp_path) == ["step-00000001"]
    assert newest_checkpoint(tmp_path, pytest.fail).step == 1


def test_saving_a_step_again_replaces_what_was_there(save, tmp_path):
    (save(1) / "training.json").write_text("damaged")
    save(1)
    assert newest_checkpoint(tmp_path, pytest.fail).step == 1
    assert names(tmp_path) == ["step-00000001"]


def test_only_the_last_ones_are_kept(save, tmp_path):
    for step in (1, 2, 3):
        save(step)
    remove_old(tmp_path, keep_last=0, step=3, warn=pytest.fail)
    assert len(names(tmp_path)) == 3
    remove_old(tmp_path, keep_last=2, step=3, warn=pytest.fail)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_damaged_checkpoint_from_later_does_not_push_out_a_whole_one(save, tmp_path):
    save(1)
    (save(9) / "training.json").unlink()
    save(2)
    remove_old(tmp_path, keep_last=1, step=2, warn=pytest.fail)
    assert names(tmp_path) == ["step-00000002", "step-00000009"]


def test_steps_are_ordered_as_numbers(save, tmp_path):
    save(2)
    save(100_000_000)
    assert newest_checkpoint(tmp_path, pytest.fail).step == 100_000_000


def test_what_a_killed_process_left_is_removed(save, tmp_path):
    save(1)
    (tmp_path / ".unfinished-123-step-00000002" / "step-00000002").mkdir(parents=True)
    (tmp_path / ".config.json.unfinished-123").write_text("{")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_training_json_holds_the_hash_of_every_other_file(save):
    folder = save(1)
    files = json.loads((folder / "training.json").read_text())["files"]
    assert sorted(files) == [name for name in names(folder) if name != "training.json"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": "2"}, "has step = '2', which is not that of its folder"),
        ({"step": 7}, "has step = 7, which is not that of its folder"),
        ({"seconds": "long"}, "is missing or damaged"),
        ({"train": []}, "is missing or damaged"),
        ({"files": {"config.json": 5}}, "is missing or damaged"),
    ],
)
def test_a_state_with_wrong_values_is_skipped_with_a_warning(save, tmp_path, changed, message):
    save(1)
    file = save(2) / "training.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    warnings = []
    newest = newest_checkpoint(tmp_path, warnings.append)
    assert newest is not None
    assert newest.step == 1
    (warning,) = warnings
    assert message in warning
    assert str(file) in warning
