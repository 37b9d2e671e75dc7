"""The models by name: the course's numbers as they must be, the published shapes against their own documents."""

import dataclasses
import subprocess
import sys

import pytest

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.presets import PRESETS, VOCAB_FROM_TOKENIZER, build, preset_settings

COURSE = ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "rope_theta")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built_and_states_no_value_that_is_the_default(name):
    config = build(name)
    assert isinstance(config, ModelConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
    stated = PRESETS[name]
    said_twice = {key for key, value in stated.items() if value == defaults[key]}
    assert said_twice <= {"max_seq_len", "n_experts_per_token"}  # worth saying of a model even so


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("mini-llama", (4096, 512, 12, 8, 2, 64, 1408, 1e4)),
        ("minimind-3", (6400, 768, 8, 8, 4, 96, 2432, 1e6)),
        ("minimind-3-moe", (6400, 768, 8, 8, 4, 96, 2432, 1e6)),
        ("minimind-3-textbook", (6400, 768, 8, 8, 4, 96, 3072, 1e6)),
    ],
)
def test_the_models_of_the_course_have_the_numbers_of_the_design(name, numbers):
    config = build(name)
    assert tuple(getattr(config, field) for field in COURSE) == numbers
    assert config.tie_embeddings
    assert (config.norm, config.norm_position, config.mlp, config.position) == ("rms", "pre", "swiglu", "rope")
    assert config.qk_norm == (name in ("minimind-3", "minimind-3-moe"))
    assert config.n_experts == (4 if name == "minimind-3-moe" else 0)
    assert config.max_seq_len == (1024 if name == "mini-llama" else 32768)


def test_a_changed_width_changes_the_head_dim_unless_the_preset_states_it():
    assert build("mini-llama", d_model=256).head_dim == 32
    assert build("qwen3-0.6b", d_model=256).head_dim == 128


def test_only_the_vocabulary_of_tiny_comes_from_the_tokenizer():
    assert {"tiny"} == VOCAB_FROM_TOKENIZER
    assert build("tiny", vocab_size=77).vocab_size == 77


def test_an_unknown_preset_or_setting_is_refused_with_the_nearest():
    with pytest.raises(ClockhandError, match="unknown preset 'mini-lama'; did you mean 'mini-llama'"):
        build("mini-lama")
    with pytest.raises(ClockhandError, match=r"unknown field 'n_layer' \(from preset tiny .*did you mean 'n_layers'"):
        build("tiny", n_layer=2)
    with pytest.raises(ClockhandError, match=r"n_heads = 0 must be at least 1 \(from preset tiny with n_heads changed"):
        build("tiny", n_heads=0)


def test_changing_the_settings_of_a_preset_leaves_the_preset_alone():
    preset_settings("tiny")["d_model"] = 1
    assert build("tiny").d_model == 192


def test_configs_and_presets_never_import_torch():
    program = "import sys, clockhand.presets; clockhand.presets.build('tiny'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_what_a_changed_setting_switches_off_leaves_the_preset_with_it():
    assert build("minimind-3", position="none").rope_theta == 10_000
    assert build("llama-3.2-1b", position="learned").rope_scaling == "none"
    assert build("qwen3-30b-a3b", n_experts=0).n_experts_per_token == 1
    with pytest.raises(ClockhandError, match="rope_theta"):  # what the user says himself is never dropped
        build("minimind-3", position="none", rope_theta=5e5)
