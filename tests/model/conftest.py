"""Small models whose weights are large and uneven, so that a mistake anywhere shows in the logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.model.transformer import Transformer

SMALL: dict[str, Any] = dict(
    vocab_size=37, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=20, max_seq_len=64
)

# One of every kind of model: what holds for "the model" is tried on each of them.
KINDS: dict[str, dict[str, Any]] = {
    "dense": dict(),
    "qk_norm": dict(qk_norm=True, attention_bias="qkv"),
    "multi_query": dict(n_kv_heads=1),
    "multi_head": dict(n_kv_heads=4),
    "moe": dict(n_experts=4, n_experts_per_token=2),
    "sliding_window": dict(sliding_window=5),
    "learned": dict(position="learned"),
    "no_positions": dict(position="none"),
    "post_norm": dict(norm_position="post", norm="layer", mlp="gelu"),
    "biases": dict(norm="layer", mlp="relu", mlp_bias=True, attention_bias="all", tie_embeddings=False),
    "interleaved": dict(rope_layout="interleaved"),
    "linear": dict(rope_scaling="linear", rope_factor=3.0),
    "ntk": dict(rope_scaling="ntk", rope_factor=3.0),
    "yarn": dict(rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=8, rope_theta=100.0),
    "llama3": dict(rope_scaling="llama3", rope_factor=4.0, rope_original_max_seq_len=8),
    "dynamic": dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=4),
}


def _make_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


def _make_model(seed: int = 0, **changes: Any) -> Transformer:
    model = Transformer(_make_config(**changes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm_weight else 0.3 * noise)
    return model.eval()


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    """`make_config(**changes)` is a small config."""
    return _make_config


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Transformer]:
    """`make_model(seed=0, **changes)` is a small model with large weights, in evaluation mode."""
    return _make_model


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The changes that make one kind of model; a test that asks for it runs once for every kind."""
    return KINDS[request.param]


@pytest.fixture(scope="session")
def make_ids() -> Callable[..., torch.Tensor]:
    """`make_ids(batch, tokens, seed=0)` is random ids of the small vocabulary."""

    def make(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, SMALL["vocab_size"], (batch, tokens), generator=generator)

    return make
