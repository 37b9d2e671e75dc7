"""Folders with packed weights: read back to the bit, small, and refused by everybody who could not honour them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import clockhand
from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop.formats import export_model, import_model, quantize_model
from clockhand.interop.hf import load_model, read_config, save_model
from clockhand.model.packed import packed, precision_of
from clockhand.model.transformer import Transformer

IDS = torch.arange(20)[None]
SIZES = dict(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, max_seq_len=64, init_std=0.2)


@pytest.fixture(scope="module", params=["interleaved", "experts"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["the clock and its hands turn"] * 3, vocab_size=270)
    kind = (
        dict(rope_layout="interleaved") if request.param == "interleaved" else dict(n_experts=4, tie_embeddings=False)
    )
    model = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, **SIZES, **kind))
    return save_model(model, tmp_path_factory.mktemp("models") / "model", tokenizer)


@pytest.fixture(scope="module")
def eighth(folder):
    out = folder.parent / "int8"
    made = quantize_model(folder, "int8", out)
    assert made.bytes < 0.32 * made.bytes_before
    return out


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_packed_folder_is_read_back_to_the_bit(folder, precision, tmp_path):
    quantize_model(folder, precision, tmp_path / "out")
    again, twin = load_model(tmp_path / "out"), packed(load_model(folder), precision)
    assert precision_of(again) == precision
    assert read_config(tmp_path / "out") == read_config(folder)
    assert again.state_dict().keys() == twin.state_dict().keys()
    assert all(torch.equal(each, twin.state_dict()[name]) for name, each in again.state_dict().items())
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, twin(IDS).logits)


def test_it_writes_the_text_of_the_model_packed_on_loading(folder, eighth):
    asked = dict(temperature=1.2, seed=3, max_new_tokens=12)
    assert clockhand.load(eighth).generate("the", **asked) == clockhand.load(folder, precision="int8").generate(
        "the", **asked
    )
    stretched = clockhand.load(eighth, rope_scaling="yarn", rope_factor=2)
    assert stretched.generate("the", **asked).ids
    assert precision_of(stretched.model) == "int8"


def test_nobody_takes_it_for_another_model(folder, eighth, tmp_path):
    assert json.loads((eighth / "config.json").read_text())["model_type"] == "clockhand"
    for ask, words in [
        (lambda: export_model(eighth, "gguf", tmp_path / "x.gguf"), "its weights are packed as int8"),
        (lambda: export_model(eighth, "hf", tmp_path / "x"), "its weights are packed as int8"),
        (lambda: import_model(eighth, tmp_path / "x"), "its weights are packed as int8"),
        (lambda: load_model(eighth, torch.float32), "holds int8 weights, which cannot be read as float32"),
        (lambda: quantize_model(eighth, "int4", tmp_path / "x"), "is packed as int8 already"),
        (lambda: quantize_model(folder, "bf16", tmp_path / "x"), "--precision bf16 must be int8 or int4"),
        (lambda: clockhand.load(eighth, precision="fp32"), "the weights are int8 already"),
    ]:
        with pytest.raises(ClockhandError, match=words):
            ask()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda weights: weights.pop("blocks.0.attention.q_proj.scale"), "tensors missing: blocks.0.attention.q_proj"),
        (lambda weights: weights.update(more=torch.ones(1)), "tensors surplus: 'more'"),
        (
            lambda weights: weights.update({"token_embedding.data": weights["token_embedding.data"].short()}),
            "token_embedding.data is of type int16 where int8 means int8",
        ),
    ],
)
def test_a_spoilt_folder_is_refused(eighth, tmp_path, spoil, words):
    weights = load_file(eighth / "model.safetensors")
    spoil(weights)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((eighth / "config.json").read_text())
    with pytest.raises(ClockhandError, match=words):
        load_model(tmp_path)


def test_an_unknown_precision_in_the_config_is_refused(eighth, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((eighth / "model.safetensors").read_bytes())
    config = json.loads((eighth / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"weights": "int9"}))
    with pytest.raises(ClockhandError, match="unknown weights 'int9'"):
        load_model(tmp_path)
