"""Which folder is meant: the one that is given, a run's result, or its newest checkpoint that can be opened."""

from pathlib import Path

import pytest

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.interop.folders import find_model_folder
from clockhand.interop.hf import load_model, save_model
from clockhand.model.transformer import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(ModelConfig(vocab_size=97, d_model=16, n_layers=1, n_heads=2, d_ff=32))


@pytest.fixture
def run(tmp_path, model) -> Path:
    folder = tmp_path / "run"
    for step in (900, 1000, 10000):
        save_model(model, folder / "checkpoints" / f"step-{step:08d}")
    (folder / "config.json").write_text("{}")  # what was resolved for the run, not a model's
    return folder


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def test_a_model_folder_is_itself(tmp_path, model):
    save_model(model, tmp_path / "m")
    assert find_model_folder(str(tmp_path / "m")) == tmp_path / "m"


def test_a_run_is_its_final_model(run, model):
    save_model(model, run / "final")
    assert find_model_folder(run) == run / "final"


def test_a_run_that_is_not_finished_is_its_newest_checkpoint(run):
    assert find_model_folder(run).name == "step-00010000"


def test_a_checkpoint_that_is_not_whole_is_passed_over(run):
    truncate(run / "checkpoints" / "step-00010000" / "model.safetensors")
    (run / "checkpoints" / "step-00001000" / "model.safetensors").unlink()
    (run / "checkpoints" / ".step-00020000.unfinished").mkdir()
    assert find_model_folder(run).name == "step-00000900"
    truncate(run / "checkpoints" / "step-00000900" / "model.safetensors")
    with pytest.raises(ClockhandError, match="none of the 3 checkpoints"):
        find_model_folder(run)


def test_what_is_no_model_is_said_with_what_was_found(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ClockhandError, match=r"neither a model folder .* nor a run folder .* it holds notes\.txt"):
        find_model_folder(tmp_path)
    with pytest.raises(ClockhandError, match="is a file"):
        find_model_folder(tmp_path / "notes.txt")
    with pytest.raises(ClockhandError, match="does not exist"):
        find_model_folder(tmp_path / "nowhere")


def test_a_truncated_model_is_named_in_one_line(tmp_path, model):
    file = save_model(model, tmp_path / "m") / "model.safetensors"
    truncate(file)
    with pytest.raises(ClockhandError, match=r"model\.safetensors .* no whole safetensors file") as refusal:
        load_model(tmp_path / "m")
    assert "\n" not in str(refusal.value)
