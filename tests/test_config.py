"""The config: an impossible or ignored setting is refused in one line with its field, value and what is allowed."""

import dataclasses
import json
import math
import typing
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand.config import CHOICES, ModelConfig, field_docs, field_names, from_dict, parse_settings
from clockhand.errors import ClockhandError, unknown_name
from clockhand.presets import build

SMALL: dict[str, Any] = dict(vocab_size=100, d_model=48, n_layers=2, n_heads=6, n_kv_heads=2, d_ff=64)
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": dict(rope_factor=2.0),
    "ntk": dict(rope_factor=2.0),
    "dynamic": dict(rope_factor=2.0, rope_original_max_seq_len=64),
    "yarn": dict(rope_factor=2.0, rope_original_max_seq_len=64),
    "llama3": dict(rope_factor=2.0, rope_original_max_seq_len=64),
}
HINTS = typing.get_type_hints(ModelConfig)


def make(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


def refusal(**changes: Any) -> str:
    with pytest.raises(ClockhandError) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ── derived values ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_kv_heads_and_head_dim_follow_from_the_others_unless_given():
    assert make(n_kv_heads=0).n_kv_heads == 6
    assert make().head_dim == 8
    assert make(head_dim=20).head_dim == 20
    assert make(d_model=50, head_dim=8).head_dim == 8  # 50 / 6 is no whole number, and need not be
    assert make().group_size == 3
    assert (make().is_moe, make(n_experts=2).is_moe) == (False, True)


def test_a_config_is_a_frozen_value():
    assert make() == make()
    assert hash(make()) == hash(make())
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().d_model = 3


def test_a_config_survives_a_round_trip_through_json():
    for scaling, extra in SCALINGS.items():
        config = make(rope_scaling=scaling, **extra)
        text = json.dumps(dataclasses.asdict(config))
        assert from_dict(ModelConfig, json.loads(text), "config.json") == config


# ── types ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", field_names(ModelConfig))
@pytest.mark.parametrize("value", ["six", 1.5, 2, True, None, [2], math.nan, math.inf, -math.inf])
def test_a_value_of_another_type_is_refused_by_name(name, value):
    kinds = typing.get_args(HINTS[name]) or (HINTS[name],)
    right_type = type(value) in kinds or (type(value) is int and float in kinds)
    if right_type and not (isinstance(value, float) and not math.isfinite(value)):
        return  # its range is another test's matter
    assert refusal(**{name: value}).startswith(f"{name} = {value!r} must be ")


def test_a_whole_number_does_for_a_float_and_becomes_one():
    config = make(rope_theta=500_000)
    assert type(config.rope_theta) is float
    assert config == make(rope_theta=5e5)
    assert "rope_theta = inf must be a finite number" in refusal(rope_theta=10**400)


# ── ranges ─────────────────────────────────────────────────────────────────────────────────────────────────────────

moe, yarn, llama3 = dict(n_experts=4), dict(rope_scaling="yarn", **SCALINGS["yarn"]), SCALINGS["llama3"]
OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    *[
        ({name: value}, f"{name} = {value} must be at least 1")
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "max_seq_len")
        for value in (0, -1)
    ],
    *[
        ({name: -1}, f"{name} = -1 must be 0 or more")
        for name in ("n_kv_heads", "head_dim", "sliding_window", "n_experts", "rope_original_max_seq_len")
    ],
    *[({name: "other"}, f"{name} = 'other' must be {' | '.join(values)}") for name, values in CHOICES.items()],
    (dict(norm_eps=0.0), "norm_eps = 0.0 must be above 0"),
    (dict(init_std=0.0), "init_std = 0.0 must be above 0"),
    (dict(balance_coef=-0.1), "balance_coef = -0.1 must be 0 or more"),
    (dict(dropout=1.0), "dropout = 1.0 must be in [0, 1)"),
    (dict(dropout=-0.1), "dropout = -0.1 must be in [0, 1)"),
    (dict(n_kv_heads=4), "n_kv_heads = 4 must be a divisor of n_heads = 6"),
    (dict(n_kv_heads=12), "n_kv_heads = 12 must be a divisor of n_heads = 6"),
    (dict(d_model=50), "d_model = 50 must be a multiple of n_heads = 6 (or give head_dim)"),
    (dict(head_dim=7), "head_dim = 7 must be even, because RoPE rotates pairs of dimensions"),
    (dict(d_model=18), "head_dim = 3 must be even"),
    (dict(rope_theta=1.0), "rope_theta = 1.0 must be above 1"),
    (dict(moe, n_experts_per_token=0), "n_experts_per_token = 0 must be between 1 and n_experts = 4"),
    (dict(moe, n_experts_per_token=5), "n_experts_per_token = 5 must be between 1 and n_experts = 4"),
    (dict(rope_scaling="linear"), "rope_factor = 1.0 must be above 1 where rope_scaling = linear"),
    (dict(rope_scaling="yarn", rope_factor=0.5, rope_original_max_seq_len=8), "rope_factor = 0.5 must be above 1"),
    (dict(rope_scaling="dynamic", rope_factor=0.5, rope_original_max_seq_len=8), "rope_factor = 0.5 must be 1 or more"),
    *[
        (
            dict(rope_scaling=name, rope_factor=2.0),
            f"rope_original_max_seq_len = 0 must be at least 1 where rope_scaling = {name}",
        )
        for name in ("dynamic", "yarn", "llama3")
    ],
    *[
        (
            dict(SCALINGS[name], rope_scaling=name, head_dim=2),
            f"head_dim = 2 must be above 2 where rope_scaling = {name}",
        )
        for name in ("ntk", "dynamic")
    ],
    (dict(yarn, rope_beta_slow=0.0), "rope_beta_slow = 0.0 must be above 0"),
    (dict(yarn, rope_beta_fast=1.0), "rope_beta_fast = 1.0 must be above rope_beta_slow = 1.0"),
    (dict(yarn, rope_attention_factor=0.0), "rope_attention_factor = 0.0 must be above 0"),
    (dict(llama3, rope_scaling="llama3", rope_low_freq_factor=0.0), "rope_low_freq_factor = 0.0 must be above 0"),
    (dict(llama3, rope_scaling="llama3", rope_high_freq_factor=1.0), "rope_high_freq_factor = 1.0 must be above 1.0"),
]


@pytest.mark.parametrize(("changes", "message"), OUT_OF_RANGE, ids=[message for _, message in OUT_OF_RANGE])
def test_what_cannot_exist_is_refused_with_field_value_and_what_is_allowed(changes, message):
    assert message in refusal(**changes)


@pytest.mark.parametrize("position", ["learned", "none"])
def test_an_odd_head_dim_is_refused_for_rope_only(position):
    assert make(head_dim=7, position=position).head_dim == 7


# ── settings nobody would read ─────────────────────────────────────────────────────────────────────────────────────

UNREAD: list[tuple[dict[str, Any], str, str]] = [
    *[
        ({name: value}, name, "n_experts = 0")
        for name, value in dict(n_experts_per_token=2, renormalize_top_k=False, balance_coef=0.1).items()
    ],
    *[
        ({"position": position, name: value}, name, f"position = {position}")
        for position in ("learned", "none")
        for name, value in dict(rope_theta=1e6, rope_layout="interleaved", rope_scaling="linear").items()
    ],
    *[
        ({**SCALINGS.get(scaling, {}), "rope_scaling": scaling, name: value}, name, f"rope_scaling = {scaling}")
        for scaling, name, value in [
            ("none", "rope_factor", 2.0),
            ("none", "rope_original_max_seq_len", 64),
            ("linear", "rope_original_max_seq_len", 64),
            ("ntk", "rope_original_max_seq_len", 64),
            ("dynamic", "rope_beta_fast", 16.0),
            ("llama3", "rope_beta_slow", 2.0),
            ("dynamic", "rope_attention_factor", 1.0),
            ("yarn", "rope_low_freq_factor", 2.0),
            ("yarn", "rope_high_freq_factor", 8.0),
        ]
    ],
]


@pytest.mark.parametrize(("changes", "name", "because"), UNREAD)
def test_a_setting_nobody_would_read_is_refused(changes, name, because):
    default = getattr(make(), name)
    message = refusal(**changes)
    assert message == f"{name} = {changes[name]!r} must be left at {default} where {because}, which does not read it"


def test_the_same_settings_are_taken_where_they_are_read():
    make(n_experts=4, n_experts_per_token=2, renormalize_top_k=False, balance_coef=0.1)
    make(rope_theta=1e6, rope_layout="interleaved", rope_scaling="linear", rope_factor=2.0)
    make(**yarn, rope_beta_fast=16.0, rope_beta_slow=2.0, rope_attention_factor=1.0)
    make(rope_scaling="llama3", **llama3, rope_low_freq_factor=2.0, rope_high_freq_factor=8.0)
    make(rope_scaling="dynamic", rope_factor=1.0, rope_original_max_seq_len=64)


# ── from a file, from the command line ─────────────────────────────────────────────────────────────────────────────


def test_an_unknown_key_is_refused_with_the_nearest_known_one_and_the_source():
    with pytest.raises(ClockhandError, match=r"unknown field 'n_layer' \(from my\.json\); did you mean 'n_layers'\?"):
        from_dict(ModelConfig, {**SMALL, "n_layer": 3}, "my.json")


def test_a_key_like_no_other_is_answered_with_all_there_are():
    message = str(unknown_name("field", "zzz", ["beta", "alpha"]))
    assert message == "unknown field 'zzz'; known: alpha, beta"


def test_missing_fields_are_named():
    with pytest.raises(ClockhandError, match=r"missing field d_model, d_ff \(from my\.json\)"):
        from_dict(ModelConfig, dict(vocab_size=10, n_layers=1, n_heads=1), "my.json")


def test_a_refusal_says_where_the_value_came_from():
    with pytest.raises(ClockhandError, match=r"^n_layers = 0 must be at least 1 \(from my\.json\)$"):
        from_dict(ModelConfig, {**SMALL, "n_layers": 0}, "my.json")


READ: list[tuple[str, str, Any]] = [
    ("n_layers=6", "n_layers", 6),
    ("n-layers=6", "n_layers", 6),
    (" n_layers = 6 ", "n_layers", 6),
    ("max_seq_len=32_768", "max_seq_len", 32768),
    ("rope_theta=1e6", "rope_theta", 1e6),
    ("rope_theta=10000", "rope_theta", 10000.0),
    ("qk_norm=true", "qk_norm", True),
    ("qk_norm=On", "qk_norm", True),
    ("qk_norm=0", "qk_norm", False),
    ("mlp=gelu", "mlp", "gelu"),
    ("rope_attention_factor=none", "rope_attention_factor", None),
    ("rope_attention_factor=1.5", "rope_attention_factor", 1.5),
]


@pytest.mark.parametrize(("setting", "name", "value"), READ)
def test_a_setting_is_read_as_its_field_s_type(setting, name, value):
    parsed = parse_settings(ModelConfig, [setting])
    assert parsed == {name: value}
    assert type(parsed[name]) is type(value)


WRONG: list[tuple[str, str]] = [
    ("n_layers", r"'n_layers' \(from --set\) must look like name=value"),
    ("n_layer=3", r"unknown field 'n_layer' \(from --set\); did you mean 'n_layers'\?"),
    ("n_layers=six", r"n_layers = 'six' \(from --set\) must be a whole number"),
    ("n_layers=1.0", r"n_layers = '1.0' \(from --set\) must be a whole number"),
    ("n_layers=1,2", r"n_layers = '1,2' \(from --set\) must be a whole number"),  # was once read as 12
    ("n_layers=", r"n_layers = '' \(from --set\) must be a whole number"),
    ("rope_theta=big", r"rope_theta = 'big' \(from --set\) must be a number"),
    ("qk_norm=2", r"qk_norm = '2' \(from --set\) must be true or false"),
    ("=3", r"unknown field '' \(from --set\)"),
]


@pytest.mark.parametrize(("setting", "message"), WRONG)
def test_a_setting_that_cannot_be_read_is_refused(setting, message):
    with pytest.raises(ClockhandError, match=message):
        parse_settings(ModelConfig, [setting])


def config_or_refusal(call: Callable[[], ModelConfig]) -> ModelConfig | ClockhandError:
    """What `call` returns, or its refusal, which must be one line; any other exception is a fault."""
    try:
        return call()
    except ClockhandError as error:
        refused = error
    assert len(str(refused).splitlines()) == 1
    return refused


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.sampled_from(field_names(ModelConfig)))
def test_no_text_whatever_is_met_with_anything_but_a_value_or_a_clear_line(text, name):
    for setting in (text, f"{name}={text}"):
        config_or_refusal(
            lambda setting=setting: from_dict(ModelConfig, {**SMALL, **parse_settings(ModelConfig, [setting])}, "--set")
        )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_config_there_can_be_is_either_whole_or_refused(data):
    """No other exception, and what is accepted has heads that divide and pairs to rotate."""
    kinds = {
        int: st.integers(-2, 40),
        float: st.one_of(st.floats(), st.sampled_from([1.0, 2.0, 1e4])),
        bool: st.booleans(),
    }
    drawn = {}
    for name in data.draw(st.lists(st.sampled_from(field_names(ModelConfig)), max_size=6, unique=True)):
        values = st.sampled_from(CHOICES[name]) if name in CHOICES else kinds.get(HINTS[name], kinds[float])
        drawn[name] = data.draw(values, label=name)
    config = config_or_refusal(lambda: make(**drawn))
    if isinstance(config, ClockhandError):
        return
    assert config.n_kv_heads * config.group_size == config.n_heads
    assert config.head_dim >= 1
    assert config.position != "rope" or config.head_dim % 2 == 0


def test_every_field_has_its_line_of_explanation():
    assert set(field_docs(ModelConfig)) == set(field_names(ModelConfig))
    assert all(field_docs(ModelConfig).values())


def test_yarn_from_a_length_in_which_no_pair_turns_once_is_refused():
    """There the ramp ran backwards (in transformers too, and the other way round)."""
    with pytest.raises(ClockhandError, match=r"rope_original_max_seq_len = 6 must be above 2π"):
        build("tiny", rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=6)
    assert build("tiny", rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=7)
