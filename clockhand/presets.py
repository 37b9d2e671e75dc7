"""Models by name, one line of numbers each.

The course's two models and their variants must exist exactly (`mini-llama`, `minimind-3`, ...); the published shapes
are here so that they can be inspected, and loaded from their own files. A preset is only numbers: `build` turns one
into a `ModelConfig`, with any field replaced *before* derived fields are settled, so that `head_dim` follows a changed
`d_model` unless the preset states it.
"""

from typing import Any

from clockhand.config import CHOICES, ModelConfig, from_dict, unread_fields
from clockhand.errors import unknown_name

_LLAMA3_ROPE: dict[str, Any] = dict(
    rope_theta=5e5, rope_scaling="llama3", rope_factor=32.0, rope_original_max_seq_len=8192
)  # fmt: skip
_MINIMIND: dict[str, Any] = dict(
    vocab_size=6400, d_model=768, n_layers=8, n_heads=8, n_kv_heads=4, rope_theta=1e6, max_seq_len=32768
)  # fmt: skip
_QWEN3: dict[str, Any] = dict(vocab_size=151936, rope_theta=1e6, max_seq_len=40960, qk_norm=True)

# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    # The demo's model: about 1.9M parameters, learns visibly within two minutes on two CPU cores.
    "tiny": dict(vocab_size=2048, d_model=192, n_layers=4, n_heads=6, n_kv_heads=2, d_ff=512, max_seq_len=256),

    # The course. 2432 = ceil(768·π/64)·64 is MiniMind's own rule for its width.
    "mini-llama": dict(vocab_size=4096, d_model=512, n_layers=12, n_heads=8, n_kv_heads=2, d_ff=1408, max_seq_len=1024),
    "minimind-3": dict(_MINIMIND, d_ff=2432, qk_norm=True),
    "minimind-3-moe": dict(_MINIMIND, d_ff=2432, qk_norm=True, n_experts=4, n_experts_per_token=1),
    "minimind-3-textbook": dict(_MINIMIND, d_ff=3072),

    # Published shapes.
    "smollm2-135m": dict(vocab_size=49152, d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, d_ff=1536, max_seq_len=8192, rope_theta=1e5, norm_eps=1e-5),
    "smollm2-360m": dict(vocab_size=49152, d_model=960, n_layers=32, n_heads=15, n_kv_heads=5, d_ff=2560, max_seq_len=8192, rope_theta=1e5, norm_eps=1e-5),
    "qwen2.5-0.5b": dict(vocab_size=151936, d_model=896, n_layers=24, n_heads=14, n_kv_heads=2, d_ff=4864, max_seq_len=32768, rope_theta=1e6, attention_bias="qkv"),
    "qwen3-0.6b": dict(_QWEN3, d_model=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, d_ff=3072),
    "qwen3-1.7b": dict(_QWEN3, d_model=2048, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, d_ff=6144),
    "qwen3-30b-a3b": dict(_QWEN3, d_model=2048, n_layers=48, n_heads=32, n_kv_heads=4, head_dim=128, d_ff=768, n_experts=128, n_experts_per_token=8, balance_coef=1e-3, tie_embeddings=False),
    "tinyllama-1.1b": dict(vocab_size=32000, d_model=2048, n_layers=22, n_heads=32, n_kv_heads=4, d_ff=5632, max_seq_len=2048, norm_eps=1e-5, tie_embeddings=False),
    "llama-3.2-1b": dict(_LLAMA3_ROPE, vocab_size=128256, d_model=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, d_ff=8192, max_seq_len=131072, norm_eps=1e-5),
    "llama-3.2-3b": dict(_LLAMA3_ROPE, vocab_size=128256, d_model=3072, n_layers=28, n_heads=24, n_kv_heads=8, head_dim=128, d_ff=8192, max_seq_len=131072, norm_eps=1e-5),
    "mistral-7b-v0.1": dict(vocab_size=32000, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=14336, max_seq_len=32768, norm_eps=1e-5, sliding_window=4096, tie_embeddings=False),
}
# fmt: on

VOCAB_FROM_TOKENIZER = frozenset({"tiny"})
"""Presets whose vocab_size is taken from the tokenizer they are trained with; every other preset states its own."""


def preset_settings(name: str) -> dict[str, Any]:
    """The numbers of a preset, as a fresh dict. Raises `ClockhandError` with the nearest known name."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return dict(PRESETS[name])


def build(name: str, **settings: Any) -> ModelConfig:
    """The config of a preset with `settings` in place of its own values.

    What the preset says of things that `settings` switch off (its rope_theta where position = none) is left out.
    """
    values = {"n_experts": 0, "position": "rope", "rope_scaling": "none", **preset_settings(name), **settings}
    if values["rope_scaling"] in CHOICES["rope_scaling"]:
        for field in unread_fields(values["n_experts"], values["position"], values["rope_scaling"]):
            if field not in settings:
                values.pop(field, None)
    source = f"preset {name}" + (f" with {', '.join(settings)} changed" if settings else "")
    return from_dict(ModelConfig, values, source)
