"""The parity passport: green for the same model, red for anything else."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop import formats, gguf, hf, parity
from clockhand.model.rope import half_to_interleaved
from clockhand.model.transformer import Transformer

SMALL = dict(vocab_size=320, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=300)


@pytest.fixture
def words() -> Tokenizer:
    return Tokenizer.train(parity.PROMPTS, vocab_size=310)


def model(init_std: float = 0.15, **changed) -> Transformer:
    """Sharp weights by default: with those a model starts from, attention looks everywhere alike."""
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{**SMALL, "init_std": init_std, **changed})).eval()


def with_wrong_rows(ours: Transformer) -> Transformer:
    """The same model, but with the rows of q in the order of the other layout of RoPE."""
    wrong = Transformer(ours.config)
    wrong.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for block in wrong.blocks:
            block.attention.q_proj.weight.copy_(
                half_to_interleaved(block.attention.q_proj.weight, ours.config.head_dim)
            )
    return wrong


# ---- transformers ----


@pytest.mark.parametrize("changed", [{}, dict(qk_norm=True), dict(qk_norm=True, n_experts=4, n_experts_per_token=2)])
def test_what_we_save_passes_in_transformers_and_the_passport_is_beside_it(words, tmp_path, changed):
    folder = hf.save_model(model(**changed), tmp_path / "m", words)
    (found,) = parity.validate(folder, "transformers").comparisons
    assert found.passed, found.verdict
    assert found.token_ids_equal
    assert found.first_differing_token is None
    assert found.greedy_text == found.greedy_text_there
    assert found.largest_difference < 1e-4 * found.spread
    written = json.loads((folder / "parity.json").read_text("utf-8"))
    assert written == {"passed": True, "comparisons": [dataclasses.asdict(found)], "refused": {}}
    assert {"clockhand", "torch", "transformers"} <= found.versions.keys()


@pytest.mark.parametrize("init_std", [0.15, 0.02])
def test_control_a_wrong_permutation_fails_loudly_even_in_an_untrained_model(words, tmp_path, init_std):
    folder = hf.save_model(model(init_std), tmp_path / "m", words)
    wrong = hf.save_model(with_wrong_rows(model(init_std)), tmp_path / "wrong", words)
    (found,) = parity.validate(folder, wrong).comparisons
    assert not found.passed
    assert "logits differ" in found.verdict
    assert found.largest_difference > 5 * parity.EXACT * found.spread


def test_control_a_weight_that_is_off_by_a_percent_fails(words, tmp_path):
    folder = hf.save_model(model(), tmp_path / "m", words)
    off = model()
    with torch.no_grad():
        off.blocks[1].mlp.down_proj.weight.mul_(1.01)
    (found,) = parity.validate(folder, hf.save_model(off, tmp_path / "off", words)).comparisons
    assert not found.passed


def test_control_another_tokenizer_fails_though_the_logits_agree(words, tmp_path):
    folder = hf.save_model(model(), tmp_path / "m", words)
    others = hf.save_model(model(), tmp_path / "o", Tokenizer.train(["nothing like it"], "byte"))
    (found,) = parity.validate(folder, others).comparisons
    assert found.verdict == "different: a prompt has other token ids there"


# ---- the rule ----


def test_rounding_may_flip_a_tie_and_nothing_else():
    assert parity._different_words(True, differing=None, tie=False) == []
    assert parity._different_words(True, differing=7, tie=True) == []
    assert parity._different_words(True, differing=7, tie=False) == ["greedy token 7 differs"]


def test_numbers_that_are_none_do_not_pass():
    nan = float("nan")
    assert parity._differences(nan)
    assert parity._rounded_differences(nan, 0.0)
    assert parity._rounded_differences(0.0, nan)


# ---- files ----


def test_a_file_that_no_program_runs_is_read_back_by_ourselves(words, tmp_path):
    folder = hf.save_model(model(norm_eps=1e-5), tmp_path / "m", words)
    file = formats.export_model(folder, "llama2c", tmp_path / "m.bin").path
    (found,) = parity.validate(folder, file).comparisons
    assert found.passed, found.verdict
    assert found.token_ids_equal is None


def test_a_program_that_does_not_exist_is_refused(words, tmp_path):
    folder = hf.save_model(model(), tmp_path / "m", words)
    with pytest.raises(ClockhandError, match=r"against = 'ollama' must be transformers, llama.cpp or the path"):
        parity.validate(folder, "ollama")


def test_a_folder_that_is_no_model_is_refused(words, tmp_path):
    folder = hf.save_model(model(), tmp_path / "m", words)
    (tmp_path / "other").mkdir()
    with pytest.raises(ClockhandError, match=r"'.*other' is neither a model folder"):
        parity.validate(folder, tmp_path / "other")


def test_a_model_that_no_other_program_can_run_is_refused_by_the_field(words, tmp_path):
    folder = hf.save_model(model(norm="layer"), tmp_path / "m", words)
    with pytest.raises(ClockhandError, match="norm = 'layer' has no counterpart"):
        parity.validate(folder)


def test_a_program_that_is_not_installed_is_named(words, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "_installed", lambda module: False)
    folder = hf.save_model(model(), tmp_path / "m", words)
    with pytest.raises(ClockhandError, match=r"pip install 'clockhand\[peers\]'"):
        parity.validate(folder, "llama.cpp")
    with pytest.raises(ClockhandError, match="no other program is installed"):
        parity.validate(folder)


# ---- llama.cpp ----


@pytest.mark.peers
def test_without_a_choice_every_installed_program_is_asked(words, tmp_path):
    pytest.importorskip("llama_cpp")
    folder = hf.save_model(model(qk_norm=True), tmp_path / "m", words)
    passport = parity.validate(folder)
    assert [each.against for each in passport.comparisons] == ["transformers", "llama.cpp"]
    assert passport.passed


@pytest.mark.peers
def test_a_program_that_cannot_run_the_model_is_said_and_the_others_are_asked(words, tmp_path):
    pytest.importorskip("llama_cpp")
    folder = hf.save_model(model(qk_norm=True, sliding_window=64), tmp_path / "m", words)
    passport = parity.validate(folder)
    assert [each.against for each in passport.comparisons] == ["transformers"]
    assert passport.passed
    assert passport.refused["llama.cpp"].startswith("sliding_window = 64")


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_an_exported_file_passes_and_one_with_a_wrong_permutation_does_not(words, tmp_path, monkeypatch, dtype):
    pytest.importorskip("llama_cpp")
    folder = hf.save_model(model(0.08), tmp_path / "m", words)
    good = formats.export_model(folder, "gguf", tmp_path / "good.gguf", dtype).path
    assert parity.validate(folder, good).passed
    monkeypatch.setattr(gguf, "_layout", lambda architecture: "half")
    wrong = formats.export_model(folder, "gguf", tmp_path / "wrong.gguf", dtype).path
    assert not parity.validate(folder, wrong).passed


@pytest.mark.peers
def test_the_sample_of_llama2c_goes_through_all_formats_with_parity(shared_data: Path, tmp_path):
    pytest.importorskip("llama_cpp")
    sample = shared_data / "llama2c"
    formats.import_model(sample / "aidreams260K.bin", tmp_path / "aid", sample / "aidreams_tok512.bin")
    for found in parity.validate(tmp_path / "aid").comparisons:
        assert found.passed, found.verdict
        assert found.first_differing_token is None


@pytest.mark.peers
def test_what_another_program_cannot_open_is_one_line(words, tmp_path):
    hf.save_model(model(), tmp_path / "model", words)
    shutil.copytree(tmp_path / "model", tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    with pytest.raises(ClockhandError, match=r"^transformers cannot open '.*broken': \S.*$"):
        parity.validate(tmp_path / "model", tmp_path / "broken")


@pytest.mark.peers
def test_other_programs_keep_their_bars_and_warnings_to_themselves(words, tmp_path, capfd):
    hf.save_model(model(max_seq_len=128), tmp_path / "model", words)
    parity.validate(tmp_path / "model")
    assert capfd.readouterr() == ("", "")
