"""In and out: what a file is, told by its content, and what comes of it."""

import json
from pathlib import Path

import pytest
import torch

from clockhand import presets
from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop import formats, gguf, hf, llama2c, names
from clockhand.model.transformer import Transformer

SMALL = dict(vocab_size=280, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=64)


def saved(folder: Path, **changed) -> Path:
    """A model folder."""
    torch.manual_seed(0)
    words = Tokenizer.train(["the clock strikes the hour"], vocab_size=270)
    return hf.save_model(Transformer(ModelConfig(**{**SMALL, **changed})), folder, words)


def logits(folder: Path) -> torch.Tensor:
    return hf.load_model(folder, torch.float32)(torch.arange(30)[None]).logits


def minimind_file(path: Path) -> Path:
    model = Transformer(presets.build("minimind-3", d_model=32, d_ff=48, n_layers=1)).half()
    torch.save({names.hugging_face_tensor(name): weight for name, weight in model.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("format", ["hf", "gguf"])
def test_a_model_goes_out_and_comes_in_again_with_the_same_logits_and_ids(tmp_path, format):
    ours = saved(tmp_path / "ours")
    exported = formats.export_model(ours, format, tmp_path / "exported")
    assert formats.recognize(exported.path) == format
    imported = formats.import_model(exported.path, tmp_path / "again")
    assert imported.format == format
    assert exported.notes == imported.notes == []
    assert torch.allclose(logits(tmp_path / "again"), logits(ours), atol=1e-5)
    assert Tokenizer.load(tmp_path / "again").fingerprint == Tokenizer.load(ours).fingerprint


def test_llama2c_goes_in_and_out_with_its_tokenizer(shared_data, tmp_path):
    sample = shared_data / "llama2c"
    words = sample / "aidreams_tok512.bin"
    imported = formats.import_model(sample / "aidreams260K.bin", tmp_path / "aid", tokenizer=words)
    assert (imported.format, imported.parameters) == ("llama2c", 230_976)
    exported = formats.export_model(tmp_path / "aid", "llama2c", tmp_path / "out/aid.bin")
    assert exported.notes == []
    assert (tmp_path / "out/tokenizer.bin").read_bytes() == words.read_bytes()
    assert torch.equal(
        llama2c.read(tmp_path / "out/aid.bin").lm_head.weight, hf.load_model(tmp_path / "aid").lm_head.weight
    )


def test_a_model_without_its_tokenizer_comes_in_and_that_is_said(shared_data, tmp_path):
    imported = formats.import_model(shared_data / "llama2c/aidreams260K.bin", tmp_path / "aid")
    assert "no tokenizer" in imported.notes[0]
    assert not (tmp_path / "aid/tokenizer.json").exists()


def test_minimind_comes_in_with_its_own_switch(shared_data, tmp_path):
    imported = formats.import_model(
        minimind_file(tmp_path / "m.pth"),
        tmp_path / "m",
        shared_data / "minimind/tokenizer.json",
        inference_rope_scaling=True,
    )
    assert imported.format == "minimind"
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["dtype"] == "float16"
    assert config["rope_parameters"] == {
        "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048, "attention_factor": 1.0,
        "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 1e6,
    }  # fmt: skip
    assert Tokenizer.load(tmp_path / "m").chat_template


@pytest.mark.parametrize(
    ("format", "dtype", "stored"),
    [
        ("gguf", None, torch.bfloat16),
        ("gguf", "f16", torch.float16),
        ("hf", None, torch.bfloat16),
        ("hf", "f32", torch.float32),
    ],
)
def test_an_export_has_the_models_own_type_unless_another_is_asked_for(tmp_path, format, dtype, stored):
    words = Tokenizer.train(["text"], "byte")
    hf.save_model(Transformer(ModelConfig(**SMALL)), tmp_path / "ours", words, dtype=torch.bfloat16)
    exported = formats.export_model(tmp_path / "ours", format, tmp_path / "out", dtype)
    assert formats.read(exported.path).model.token_embedding.weight.dtype == stored


def test_q8_0_is_half_of_f16(tmp_path):
    ours = saved(tmp_path / "ours", d_model=128, d_ff=256)
    sizes = [
        formats.export_model(ours, "gguf", tmp_path / f"{dtype}.gguf", dtype).path.stat().st_size
        for dtype in gguf.DTYPES
    ]
    f32, f16, bf16, q8_0 = sizes
    assert f32 > 1.8 * f16 > 1.8 * 1.7 * q8_0
    assert f16 == bf16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no model that clockhand knows"),
        (b"hello, I am a story about llamas and how they live", "no model that clockhand knows"),
        (b"\x80\x04\x95", "a bare pickle, which could run code"),
    ],
)
def test_what_is_no_model_is_refused_by_its_content(tmp_path, content, message):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ClockhandError, match=message):
        formats.import_model(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_name_of_a_file_does_not_matter(tmp_path):
    gguf_file = formats.export_model(saved(tmp_path / "ours"), "gguf", tmp_path / "model.pth").path
    assert formats.recognize(gguf_file) == "gguf"
    assert formats.recognize(minimind_file(tmp_path / "model.gguf")) == "minimind"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(format="onnx"), "unknown format 'onnx'"),
        (dict(format="gguf", dtype="q4_0"), "unknown dtype 'q4_0'"),
        (dict(format="hf", dtype="q8_0"), "unknown dtype 'q8_0'"),
        (dict(format="llama2c", dtype="q4_0"), "unknown dtype 'q4_0'"),
        (
            dict(format="llama2c"),
            "norm_eps = 1e-06 does not fit into llama2.c, which has no place for it and means 1e-05",
        ),
    ],
)
def test_an_export_that_cannot_be_is_refused_and_writes_nothing(tmp_path, given, message):
    ours = saved(tmp_path / "ours")
    with pytest.raises(ClockhandError, match=message):
        formats.export_model(ours, out=tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_a_model_that_only_clockhand_can_run_is_not_exported_as_hugging_face(tmp_path):
    ours = saved(tmp_path / "ours", norm="layer")
    with pytest.raises(ClockhandError, match="norm = 'layer' has no counterpart"):
        formats.export_model(ours, "hf", tmp_path / "out")


def test_an_old_export_outlives_a_failed_new_one(tmp_path):
    ours, file = saved(tmp_path / "ours"), tmp_path / "m.gguf"
    before = formats.export_model(ours, "gguf", file).path.read_bytes()
    with pytest.raises(ClockhandError):
        formats.export_model(saved(tmp_path / "other", sliding_window=8, qk_norm=True), "gguf", file)
    assert file.read_bytes() == before


def test_a_folder_is_no_place_for_a_file(tmp_path):
    with pytest.raises(ClockhandError, match="is a folder, but gguf is one file"):
        formats.export_model(saved(tmp_path / "ours"), "gguf", tmp_path)


def test_a_tokenizer_too_large_for_the_model_is_refused(tmp_path, shared_data):
    saved(tmp_path / "ours")
    with pytest.raises(ClockhandError, match="6400 ids, but the model only 280"):
        formats.import_model(tmp_path / "ours", tmp_path / "out", tokenizer=shared_data / "minimind")
    assert not (tmp_path / "out").exists()
