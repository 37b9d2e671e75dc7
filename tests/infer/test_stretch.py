"""A context stretched at inference: the same weights, another rotation, and no for what makes no sense."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.stretch import stretched, stretched_config
from clockhand.interop.minimind import with_inference_rope_scaling
from clockhand.model.transformer import Transformer

SIZES = dict(vocab_size=64, d_model=32, n_layers=2, n_heads=2, d_ff=48, max_seq_len=64)
SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3")


def model_with(**changes):
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{**SIZES, "init_std": 0.2, **changes})).eval()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_stretched_model_is_the_model_of_that_config_with_the_same_weights_uncopied(scaling, tied):
    model, ids = model_with(tie_embeddings=tied), torch.arange(40)[None]
    long = stretched(model, scaling, 4.0)
    assert long.config.max_seq_len == 256
    original = dict(rope_original_max_seq_len=64) if scaling in ("dynamic", "yarn", "llama3") else {}
    direct = model_with(tie_embeddings=tied, rope_scaling=scaling, rope_factor=4.0, max_seq_len=256, **original)
    assert long.config == direct.config
    assert torch.equal(long(ids).logits, direct(ids).logits)
    if scaling != "dynamic":  # which stretches nothing within the trained length
        assert not torch.allclose(long(ids).logits, model(ids).logits, atol=1e-3)
    for name, weight in model.state_dict().items():
        assert long.state_dict()[name].data_ptr() == weight.data_ptr()
    assert (long.lm_head.weight is long.token_embedding.weight) == tied
    assert not long.training


def test_none_takes_a_scaling_off_and_nothing_asked_is_nothing_done():
    model = model_with()
    assert stretched(model) is model
    plain = stretched(stretched(model, "yarn", 4.0), "none")
    ids = torch.arange(40)[None]
    assert torch.equal(plain(ids).logits, model(ids).logits)
    assert plain.config.max_seq_len == 256


def test_a_factor_counts_from_the_trained_length_and_never_shortens():
    config = ModelConfig(**SIZES)
    assert stretched_config(config, "yarn", 4.0, trained=32).max_seq_len == 128
    assert stretched_config(config, "yarn", 4.0, trained=32).rope_original_max_seq_len == 32
    assert stretched_config(config, "linear", 4.0, trained=8).max_seq_len == 64


def test_minimind_s_switch_is_what_import_makes_of_it():
    model = model_with(max_seq_len=32768)
    ids = torch.arange(40)[None]
    ours, theirs = stretched(model, inference_rope_scaling=True), with_inference_rope_scaling(model)
    assert ours.config == theirs.config
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert stretched(model_with(), inference_rope_scaling=True).config.max_seq_len == 32768


@pytest.mark.parametrize(
    ("changes", "asked", "words"),
    [
        (dict(position="learned"), dict(rope_scaling="yarn", rope_factor=2.0), "position = learned"),
        (dict(position="none"), dict(inference_rope_scaling=True), "inference_rope_scaling needs a model with RoPE"),
        ({}, dict(rope_scaling="yarn"), "needs rope_factor"),
        ({}, dict(rope_factor=2.0), "rope_factor = 2.0 has no effect without"),
        ({}, dict(rope_scaling="none", rope_factor=2.0), "no effect with rope_scaling = none"),
        ({}, dict(rope_scaling="yarm", rope_factor=2.0), "did you mean 'yarn'"),
        ({}, dict(rope_scaling="linear", rope_factor=1.0), "rope_factor = 1.0 must be above 1"),
        ({}, dict(rope_scaling="yarn", rope_factor=float("nan")), "rope_factor = nan must be a finite number"),
        ({}, dict(rope_scaling="linear", rope_factor=2.0, inference_rope_scaling=True), "give no rope_scaling"),
        (
            dict(rope_scaling="ntk", rope_factor=3.0),
            dict(rope_scaling="yarn", rope_factor=2.0),
            "ntk by 3 in the model",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(changes, asked, words):
    with pytest.raises(ClockhandError, match=words):
        stretched(model_with(**changes), **asked)
