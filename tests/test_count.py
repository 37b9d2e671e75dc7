"""What is counted from the config equals what is built, what torch measures, and what was published."""

import dataclasses
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clockhand import count
from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.model.cache import KVCache
from clockhand.model.transformer import Transformer
from clockhand.presets import PRESETS, build

SMALL = ModelConfig(vocab_size=97, d_model=24, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=40, max_seq_len=64)


def small(**settings: object) -> ModelConfig:
    return dataclasses.replace(SMALL, **settings)  # type: ignore[arg-type]


def built(config: ModelConfig) -> Transformer:
    with torch.device("meta"):  # shapes without storage: 30 billion parameters cost no memory
        return Transformer(config)


def parameters_by_module(model: Transformer) -> dict[str, int]:
    """Parameters of the built model under the names of `count.modules`: numbers of layers and experts taken out."""
    sums: Counter[str] = Counter()
    for name, parameter in model.named_parameters():  # a tied matrix appears once
        sums[re.sub(r"\.\d+\.", ".", name).rpartition(".")[0]] += parameter.numel()
    return dict(sums)


def counted_leaves(config: ModelConfig) -> dict[str, int]:
    return {module.path: module.parameters for module in count.modules(config) if module.part.own}


# ---------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_module_by_module_the_parameters_counted(name: str) -> None:
    config = build(name)
    # Layers are equal, so two of them tell as much as 48 with 128 experts each, and are built in a blink.
    two_layers = dataclasses.replace(config, n_layers=2)
    model = built(two_layers)
    assert counted_leaves(two_layers) == parameters_by_module(model)
    layers = sum(p.numel() for p in model.blocks[0].parameters()) * (config.n_layers - 2)
    assert count.total_parameters(config) == sum(p.numel() for p in model.parameters()) + layers


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("mini-llama", 35_926_528),
        ("minimind-3", 63_912_192),
        ("minimind-3-moe", 198_416_640),
        ("minimind-3-textbook", 75_707_136),
        ("smollm2-135m", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b-v0.1", 7_241_732_096),
    ],
)
def test_the_count_is_the_published_one(name: str, published: int) -> None:
    assert count.total_parameters(build(name)) == published


def test_the_chapters_figures_are_found() -> None:
    by_path = {module.path: module.parameters for module in count.modules(build("mini-llama"))}
    assert by_path["blocks"] == 12 * 2_819_072
    assert by_path["blocks.mlp"] == 25_952_256
    assert round(100 * by_path["blocks.mlp"] / 35_926_528, 2) == 72.24
    assert by_path["lm_head"] == 0
    assert count.total_parameters(build("mini-llama", tie_embeddings=False)) == 38_023_680

    assert count.active_parameters(build("minimind-3-moe")) == 63_936_768
    router = {module.path: module for module in count.modules(build("minimind-3-moe"))}["blocks.mlp.router"]
    assert router.part.own == 3_072


def test_a_dense_model_uses_all_its_parameters() -> None:
    for name in ("mini-llama", "minimind-3", "llama-3.2-1b"):
        assert count.active_parameters(build(name)) == count.total_parameters(build(name))


def test_parameters_without_embeddings_are_qwens_published_non_embedding_figures() -> None:
    # Their cards say 0.44B and 29.9B: an untied head is left out like the embedding.
    assert round(count.non_embedding_parameters(build("qwen3-0.6b")) / 1e9, 2) == 0.44
    assert round(count.non_embedding_parameters(build("qwen3-30b-a3b")) / 1e9, 1) == 29.9


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    n_kv_heads = draw(st.integers(1, 3))
    n_experts = draw(st.integers(0, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(1, 40)),
        d_model=draw(st.integers(1, 20)),
        n_layers=draw(st.integers(1, 3)),
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        d_ff=draw(st.integers(1, 20)),
        max_seq_len=draw(st.integers(1, 30)),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_position=draw(st.sampled_from(["pre", "post"])),
        qk_norm=draw(st.booleans()),
        attention_bias=draw(st.sampled_from(["none", "qkv", "all"])),
        sliding_window=draw(st.integers(0, 8)),
        mlp=draw(st.sampled_from(["swiglu", "gelu", "relu"])),
        mlp_bias=draw(st.booleans()),
        n_experts=n_experts,
        n_experts_per_token=draw(st.integers(1, max(n_experts, 1))),
        position=draw(st.sampled_from(["rope", "learned", "none"])),
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=80, deadline=None)
@given(configs())
def test_whatever_the_switches_the_count_is_what_is_built(config: ModelConfig) -> None:
    model = built(config)
    assert counted_leaves(config) == parameters_by_module(model)
    assert count.total_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    assert 0 < count.active_parameters(config) <= count.total_parameters(config)


# --------------------------------------------------------------------------------------------------------- FLOPs


def measured_flops(model: Transformer, tokens: int, backward: bool = False) -> int:
    """What torch counts for one sequence. The plain math kernel, so that every product is seen for what it is."""
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(ids).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


def unseen_flops(config: ModelConfig, tokens: int) -> int:
    """What the math kernel spends on pairs that the mask then hides: T·T pairs are computed, T·(T+1)/2 are needed."""
    hidden_pairs = tokens * tokens - tokens * (tokens + 1) // 2
    return 4 * config.n_layers * config.n_heads * config.head_dim * hidden_pairs


VARIANTS = {
    "gqa": {},
    "mqa with free head_dim": dict(n_kv_heads=1, head_dim=10),
    "relu, untied, biases, learned positions": dict(
        mlp="relu", tie_embeddings=False, attention_bias="all", mlp_bias=True, position="learned"
    ),
    "moe": dict(n_experts=4, n_experts_per_token=2, qk_norm=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_flops_are_those_torch_counts_but_for_the_masked_half(variant: str) -> None:
    config = small(**VARIANTS[variant])
    measured = measured_flops(Transformer(config), tokens=16)
    assert measured == count.forward_flops(config, 16) + unseen_flops(config, 16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_training_costs_three_times_the_forward_pass(variant: str) -> None:
    config = small(**VARIANTS[variant])
    measured = measured_flops(Transformer(config), tokens=16, backward=True)
    assert measured == count.training_flops(config, 16) + 3 * unseen_flops(config, 16)


def test_one_decoded_token_costs_exactly_what_torch_counts() -> None:
    model, cache = Transformer(SMALL), KVCache(SMALL, batch_size=1)
    model(torch.randint(97, (1, 20)), cache=cache)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randint(97, (1, 1)), cache=cache)
    assert counter.get_total_flops() == count.decode_flops(SMALL, 21)


@given(tokens=st.integers(1, 40), window=st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_reading_a_sequence_costs_as_much_as_decoding_each_of_its_tokens(tokens: int, window: int) -> None:
    config = small(sliding_window=window)
    one_by_one = sum(count.decode_flops(config, length) for length in range(1, tokens + 1))
    assert count.forward_flops(config, tokens) == one_by_one


# --------------------------------------------------------------------------------------------------------- bytes


def test_kv_bytes_per_token_are_the_chapters() -> None:
    assert count.kv_bytes_per_token(build("mini-llama")) == 6_144
    assert count.kv_bytes_per_token(build("mini-llama", n_kv_heads=8)) == 24_576
    assert count.kv_bytes_per_token(build("minimind-3")) == 12_288
    assert count.kv_bytes_per_token(build("minimind-3", n_kv_heads=8)) == 24_576


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_full_cache_has_the_bytes_counted(precision: str, dtype: torch.dtype) -> None:
    cache = KVCache(SMALL, batch_size=1, dtype=dtype)
    Transformer(SMALL)(torch.zeros(1, SMALL.max_seq_len, dtype=torch.int64), cache=cache)
    assert cache.nbytes == count.kv_bytes(SMALL, SMALL.max_seq_len, precision)


def test_a_sliding_window_bounds_what_must_be_remembered() -> None:
    mistral = build("mistral-7b-v0.1")
    assert count.kv_bytes(mistral, 32_768) == count.kv_bytes(mistral, 4_096) == 4_096 * 131_072
    assert count.kv_bytes(mistral, 100) == 100 * 131_072


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_weight_bytes_are_those_of_the_built_model(precision: str, dtype: torch.dtype) -> None:
    model = built(SMALL).to(dtype)
    assert count.weight_bytes(SMALL, precision) == sum(parameter.nbytes for parameter in model.parameters())


def test_an_unknown_precision_is_refused_with_the_nearest() -> None:
    with pytest.raises(ClockhandError, match="unknown precision 'bf61'; did you mean 'bf16'"):
        count.weight_bytes(SMALL, "bf61")
