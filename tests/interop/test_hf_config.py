"""Configs in Hugging Face's words: ours survive the way there and back, and nothing foreign is ignored."""

import json
import math

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from clockhand.config import CHOICES, ModelConfig
from clockhand.errors import ClockhandError
from clockhand.interop.names import FAMILIES, export_obstacle, family_for, from_hugging_face, to_hugging_face
from clockhand.model.rope import attention_factor, frequencies
from clockhand.presets import PRESETS, build

transformers.logging.set_verbosity_error()

LLAMA = dict(
    model_type="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16}
MOE = {**QWEN3, "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


def heard(config: ModelConfig) -> ModelConfig:
    return from_hugging_face(json.loads(json.dumps(to_hugging_face(config))), "config.json")


def config(**settings) -> ModelConfig:
    return ModelConfig(**{**dict(vocab_size=97, d_model=48, n_layers=2, n_heads=4, d_ff=64), **settings})


@st.composite
def any_config(draw) -> ModelConfig:
    """Any model that can exist, most of them unknown to Hugging Face."""
    chosen = {name: draw(st.sampled_from(values)) for name, values in CHOICES.items()}
    chosen |= {name: draw(st.booleans()) for name in ("qk_norm", "mlp_bias", "residual", "tie_embeddings")}
    chosen |= dict(norm_eps=draw(st.sampled_from([1e-6, 1e-5])), sliding_window=draw(st.sampled_from([0, 8])))
    chosen |= dict(n_kv_heads=draw(st.sampled_from([1, 2, 4])), head_dim=draw(st.sampled_from([0, 16])))
    chosen |= dict(dropout=draw(st.sampled_from([0.0, 0.1])), init_std=draw(st.sampled_from([0.02, 0.1])))
    if draw(st.booleans()):
        chosen |= dict(n_experts=4, n_experts_per_token=draw(st.sampled_from([1, 3])))
        chosen |= dict(renormalize_top_k=draw(st.booleans()))
    if chosen["position"] != "rope":
        chosen |= dict(rope_scaling="none", rope_layout="half")
    else:
        chosen["rope_theta"] = draw(st.floats(10, 1e7))
    if chosen["rope_scaling"] != "none":
        chosen["rope_factor"] = draw(st.floats(1.5, 40))
    if chosen["rope_scaling"] in ("dynamic", "yarn", "llama3"):
        chosen["rope_original_max_seq_len"] = draw(st.integers(7, 4096))
    if chosen["rope_scaling"] == "yarn":
        chosen["rope_attention_factor"] = draw(st.none() | st.floats(0.5, 2))
    return config(**chosen)


@settings(max_examples=200, deadline=None)
@given(any_config())
def test_every_config_survives_the_way_there_and_back(model):
    assert heard(model) == model


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_family_and_survives(name):
    model = build(name)
    assert export_obstacle(model) is None
    assert heard(model) == model
    assert "clockhand" not in to_hugging_face(model)


def test_the_family_follows_from_the_values():
    assert family_for(build("mini-llama")).architecture == "LlamaForCausalLM"
    assert family_for(build("minimind-3")).architecture == "Qwen3ForCausalLM"
    assert family_for(build("minimind-3-moe")).architecture == "Qwen3MoeForCausalLM"
    assert family_for(build("mistral-7b-v0.1")).architecture == "MistralForCausalLM"
    assert family_for(build("qwen2.5-0.5b")).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        (dict(norm="layer"), "norm = 'layer' has no counterpart in Hugging Face's llama or mistral"),
        (dict(norm_position="post"), "norm_position = 'post'"),
        (dict(residual=False), "residual = False"),
        (dict(mlp="gelu"), "mlp = 'gelu'"),
        (dict(position="none"), "position = 'none'"),
        (dict(qk_norm=True, mlp_bias=True), "mlp_bias = True has no counterpart in Hugging Face's qwen3"),
        (dict(qk_norm=True, attention_bias="qkv"), "attention_bias = 'qkv'"),
        (dict(attention_bias="all", sliding_window=8), "sliding_window = 8 has no counterpart in Hugging Face's llama"),
        (dict(n_experts=4), "qk_norm = False has no counterpart in Hugging Face's qwen3_moe"),
    ],
)
def test_the_field_that_stands_in_the_way_of_an_export_is_named(changed, obstacle):
    assert obstacle in export_obstacle(config(**changed))
    assert to_hugging_face(config(**changed))["model_type"] == "clockhand"


def test_static_ntk_scaling_is_a_larger_base_exactly():
    scaled = config(head_dim=16, rope_scaling="ntk", rope_factor=4.0)
    said = to_hugging_face(scaled)
    assert said["rope_parameters"]["rope_type"] == "default"
    folded = config(head_dim=16, rope_theta=said["rope_theta"])
    assert frequencies(folded).equal(frequencies(scaled))


@st.composite
def any_rope(draw) -> ModelConfig:
    """RoPE as models in use have it, and well beyond."""
    scaling = draw(st.sampled_from(["none", "linear", "ntk", "dynamic", "yarn", "llama3"]))
    chosen = dict(head_dim=draw(st.sampled_from([4, 16, 64, 96])), rope_theta=draw(st.floats(10, 1e7)))
    if scaling != "none":
        chosen |= dict(rope_scaling=scaling, rope_factor=draw(st.floats(1.01, 64)))
    if scaling in ("dynamic", "yarn", "llama3"):
        chosen |= dict(rope_original_max_seq_len=draw(st.integers(1, 40_000)))
    if scaling == "yarn":
        slow = draw(st.floats(0.1, 4))
        chosen |= dict(rope_beta_slow=slow, rope_beta_fast=slow + draw(st.floats(0.1, 40)))
        chosen |= dict(rope_attention_factor=draw(st.none() | st.floats(0.5, 2)))
        # Where no pair turns as slowly as beta_slow, or all turn faster than beta_fast, YaRN's ramp ends before it
        # begins, and the published programs disagree about what that means.
        turns = chosen["rope_original_max_seq_len"] / (2 * math.pi)
        assume(turns > slow and turns / chosen["rope_beta_fast"] < chosen["rope_theta"])
    if scaling == "llama3":
        low = draw(st.floats(0.1, 4))
        chosen |= dict(rope_low_freq_factor=low, rope_high_freq_factor=low + draw(st.floats(1, 40)))
    return config(max_seq_len=4096, **chosen)


@settings(max_examples=150, deadline=None)
@given(any_rope(), st.integers(1, 100_000))
def test_every_frequency_is_the_one_transformers_computes(model, length):
    """Theirs are fp32: a power of a large base loses some units in the last place, and a steep ramp multiplies that."""
    said = {key: value for key, value in to_hugging_face(model).items() if key != "architectures"}
    theirs = transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    rope_type = theirs.rope_parameters["rope_type"]
    if rope_type == "default":
        there, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        there, factor = ROPE_INIT_FUNCTIONS[rope_type](theirs, seq_len=length)
    here = frequencies(model, torch.tensor([length])).flatten()
    assert torch.allclose(here.float(), there, rtol=1e-4, atol=0)
    assert attention_factor(model) == pytest.approx(factor)


def test_yarns_mscale_becomes_an_attention_factor():
    yarn = dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.5)
    model = from_hugging_face({**LLAMA, "rope_scaling": yarn}, "config.json")
    assert attention_factor(model) == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))


def test_a_factor_that_yarn_does_not_state_is_the_ratio_of_the_lengths():
    yarn = dict(type="yarn", original_max_position_embeddings=4096)
    model = from_hugging_face({**LLAMA, "max_position_embeddings": 16384, "rope_scaling": yarn}, "config.json")
    assert (model.rope_factor, model.rope_original_max_seq_len) == (4.0, 4096)


def test_what_is_absent_means_what_transformers_means_by_it():
    for raw, family in (
        (LLAMA, "Llama"),
        (QWEN3, "Qwen3"),
        (MOE, "Qwen3Moe"),
        ({**LLAMA, "model_type": "mistral"}, "Mistral"),
    ):
        ours = from_hugging_face(raw, "config.json")
        theirs = getattr(transformers, f"{family}Config")(**raw)
        assert ours == from_hugging_face(theirs.to_dict(), "transformers")


def test_head_dim_is_believed_when_it_is_given():
    assert from_hugging_face({**LLAMA, "head_dim": 20}, "config.json").head_dim == 20
    assert from_hugging_face({**LLAMA, "head_dim": None}, "config.json").head_dim == 12


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({**LLAMA, "model_type": "gemma2"}, "unknown model_type 'gemma2'"),
        ({**LLAMA, "model_type": None}, "unknown model_type"),
        ({**LLAMA, "final_logit_softcapping": 30.0}, "'final_logit_softcapping'"),
        ({**LLAMA, "attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({**LLAMA, "auto_map": {"AutoModel": "x.Y"}}, "'auto_map'"),
        ({**LLAMA, "num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act = 'gelu' in config.json must be 'silu' or 'swish'"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({**LLAMA, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "unknown rope_type 'longrope'"),
        ({**LLAMA, "rope_scaling": {"type": "su"}}, "unknown rope_type 'su'"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_type = 'linear' in config.json needs 'factor'"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "'mrope_section'"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate = False"),
        ({**LLAMA, "rope_scaling": [1]}, "rope_scaling in config.json must be an object"),
        ({**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is stated twice"),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "scaling of RoPE is stated twice",
        ),
        ({**LLAMA, "original_max_position_embeddings": 64}, "'original_max_position_embeddings'"),
        ({**LLAMA, "sliding_window": 64}, "'sliding_window'"),
        ({**LLAMA, "model_type": "mistral", "max_window_layers": 1}, "'max_window_layers'"),
        ({**LLAMA, "num_local_experts": 8}, "'num_local_experts'"),
        ({**LLAMA, "layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias = 'yes'"),
        ({**LLAMA, "hidden_size": None}, "does not state 'hidden_size'"),
        ({**LLAMA, "hidden_size": "48"}, "d_model = '48' must be of type int"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "max_window_layers = 1"),
        ({**MOE, "mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
        ({**MOE, "decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({**MOE, "num_local_experts": 8}, "'num_local_experts'"),
        ({**MOE, "shared_expert_intermediate_size": 8}, "'shared_expert_intermediate_size'"),
        ({**LLAMA, "rope_theta": 10**400}, "rope_theta = inf must be a finite number"),
    ],
)
def test_what_we_could_not_honour_is_refused_by_name(raw, said):
    with pytest.raises(ClockhandError) as refusal:
        from_hugging_face(raw, "config.json")
    assert said in str(refusal.value)
    assert "config.json" in str(refusal.value)


def test_keys_that_change_nothing_are_accepted():
    harmless = dict(
        use_cache=True, attention_dropout=0.1, torch_dtype="bfloat16", pretraining_tp=1, transformers_version="4.30.0",
        rope_interleaved=False, quantization_config=None, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    assert from_hugging_face({**LLAMA, **harmless}, "config.json") == from_hugging_face(LLAMA, "config.json")


def test_a_change_beside_what_only_we_can_say_is_refused_not_overruled():
    said = to_hugging_face(config(dropout=0.1))
    assert said["clockhand"] == {"dropout": 0.1}
    assert from_hugging_face(said, "config.json").dropout == 0.1
    said = to_hugging_face(config(head_dim=16, rope_scaling="ntk", rope_factor=4.0))
    said["rope_theta"] = said["rope_parameters"]["rope_theta"] = 5e5
    with pytest.raises(ClockhandError, match=r"rope_theta = 500000\.0 in config\.json contradicts"):
        from_hugging_face(said, "config.json")


def test_every_family_can_say_its_own_words():
    for family in FAMILIES:
        own = {name: values[-1] for name, values in family.can_say.items()}
        model = config(head_dim=16, n_experts=4 if family.moe else 0, sliding_window=8 if family.windowed else 0, **own)
        assert family_for(model) is family
        assert heard(model) == model


def test_qwen3_as_transformers_saves_it_has_no_windows_where_every_layer_says_so():
    """`use_sliding_window` is true and max_window_layers above the number of layers: it was refused."""
    layers = QWEN3["num_hidden_layers"]
    raw = {**QWEN3, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": layers + 4}
    assert from_hugging_face({**raw, "layer_types": ["full_attention"] * layers}, "config.json").sliding_window == 0


def test_a_dynamic_model_begins_to_stretch_where_transformers_does_whatever_original_length_is_stated():
    dynamic = dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=16)
    model = from_hugging_face({**LLAMA, "rope_scaling": dynamic}, "config.json")
    assert model.rope_original_max_seq_len == model.max_seq_len


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_a_factor_of_1_is_no_scaling(rope_type):
    scaling = dict(rope_type=rope_type, factor=1.0, original_max_position_embeddings=64)
    stretched = from_hugging_face({**LLAMA, "rope_scaling": scaling}, "config.json")
    assert stretched == from_hugging_face(LLAMA, "config.json")


def test_a_factor_without_a_type_is_told_as_that():
    with pytest.raises(ClockhandError, match=r"factor = 4.0 .* needs a rope_type"):
        from_hugging_face({**LLAMA, "rope_scaling": {"factor": 4.0}}, "config.json")
