"""How big a model is, from its config alone: parameters, floating-point operations, bytes. No tensor is made.

The model is written down once more as a tree of `Part`s under the names its modules have, with sizes in place of
weights, and every sum is taken over that tree. Tests hold it against the built model, module by module.

What is counted, and what is not:

    parameters     a tied head has none of its own: the embedding matrix is counted once
    active         what one token uses: of the experts only the chosen ones, the embedding tables in full
    FLOPs          matrix products only, multiply and add counted as two: 2 per weight a token is multiplied by, and
                   2·Dh per head for each key it scores and again for each value it mixes. A tied head multiplies like
                   any other; looking up an embedding is free; norms, softmax, rotation and activations are left out
    causal         a token pays for the keys it can see. torch's FlopCounterMode bills fused attention for all T·T
                   pairs, of which only T·(T+1)/2 are needed
    training       three times the forward pass: the backward pass has two products for each of its own
    int8           one byte a value. The scales are not counted: one for each row would add 2 to 4 bytes a row
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from clockhand.config import ModelConfig
from clockhand.errors import unknown_name

BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
"""Bytes of one value in each precision (fp16 is bf16's size)."""


@dataclass(frozen=True)
class Part:
    """One module of the model, or `copies` equal ones of which a token visits `visited`."""

    name: str
    own: int = 0
    """Parameters that one copy holds itself, apart from those of its `parts`."""
    multiplied: int = 0
    """Weights of one copy that a token is multiplied by: no biases, no tables, but a tied head's borrowed matrix."""
    parts: tuple["Part", ...] = ()
    copies: int = 1
    visited: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * (self.own + sum(part.parameters for part in self.parts))

    @property
    def active_parameters(self) -> int:
        return self.visited * (self.own + sum(part.active_parameters for part in self.parts))

    @property
    def matmul_flops(self) -> int:
        """Of one token's forward pass, without what attention spends on keys and values."""
        return self.visited * (2 * self.multiplied + sum(part.matmul_flops for part in self.parts))


def model_parts(config: ModelConfig) -> Part:
    """The whole model as a tree. Modules the model does not have are not in it; a tied head is, with 0 parameters."""
    table = config.vocab_size * config.d_model
    parts = [Part("token_embedding", own=table)]
    if config.position == "learned":
        parts.append(Part("position_embedding", own=config.max_seq_len * config.d_model))
    parts.append(Part("blocks", parts=_block_parts(config), copies=config.n_layers, visited=config.n_layers))
    if config.norm_position == "pre":
        parts.append(_norm("final_norm", config, config.d_model))
    parts.append(Part("lm_head", own=0 if config.tie_embeddings else table, multiplied=table))
    return Part("model", parts=tuple(parts))


def _block_parts(config: ModelConfig) -> tuple[Part, ...]:
    width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    qkv_bias, o_bias = config.attention_bias != "none", config.attention_bias == "all"
    attention = [
        _linear("q_proj", config.d_model, width, qkv_bias),
        _linear("k_proj", config.d_model, kv_width, qkv_bias),
        _linear("v_proj", config.d_model, kv_width, qkv_bias),
        _linear("o_proj", width, config.d_model, o_bias),
    ]
    if config.qk_norm:
        attention += [_norm("q_norm", config, config.head_dim), _norm("k_norm", config, config.head_dim)]

    mlp = [
        _linear("up_proj", config.d_model, config.d_ff, config.mlp_bias),
        _linear("down_proj", config.d_ff, config.d_model, config.mlp_bias),
    ]
    if config.mlp == "swiglu":
        mlp.insert(0, _linear("gate_proj", config.d_model, config.d_ff, config.mlp_bias))
    if config.is_moe:
        experts = Part("experts", parts=tuple(mlp), copies=config.n_experts, visited=config.n_experts_per_token)
        mlp = [_linear("router", config.d_model, config.n_experts, bias=False), experts]
    return (
        _norm("attention_norm", config, config.d_model),
        Part("attention", parts=tuple(attention)),
        _norm("mlp_norm", config, config.d_model),
        Part("mlp", parts=tuple(mlp)),
    )


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Part:
    return Part(name, own=inputs * outputs + (outputs if bias else 0), multiplied=inputs * outputs)


def _norm(name: str, config: ModelConfig, width: int) -> Part:
    return Part(name, own=width if config.norm == "rms" else 2 * width)


class Module(NamedTuple):
    """A part at its place in the model, summed over all the layers and experts it occurs in."""

    path: str  # as in the state dict, without the numbers of layers and experts: blocks.attention.q_proj
    part: Part
    parameters: int
    active_parameters: int


def modules(config: ModelConfig) -> list[Module]:
    """Every module in the order a tensor meets them, the sums (`blocks`, `blocks.mlp`) before what they hold."""
    return list(_walk(model_parts(config).parts, "", 1, 1))


def _walk(parts: tuple[Part, ...], prefix: str, copies: int, visited: int) -> Iterator[Module]:
    for part in parts:
        path = prefix + part.name
        yield Module(path, part, copies * part.parameters, visited * part.active_parameters)
        yield from _walk(part.parts, f"{path}.", copies * part.copies, visited * part.visited)


def total_parameters(config: ModelConfig) -> int:
    return model_parts(config).parameters


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one token uses: all of them in a dense model."""
    return model_parts(config).active_parameters


def non_embedding_parameters(config: ModelConfig) -> int:
    """Without the tables over the vocabulary and the positions; an untied head is such a table too."""
    tables = ("token_embedding", "position_embedding", "lm_head")
    return sum(part.parameters for part in model_parts(config).parts if part.name not in tables)


def forward_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of reading one sequence of `tokens` tokens from nothing, logits at every position."""
    return tokens * model_parts(config).matmul_flops + _attention_flops(config, _visible_pairs(config, tokens))


def decode_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of one more token when a cache holds all before it and the sequence then has `tokens` tokens."""
    return model_parts(config).matmul_flops + _attention_flops(config, keys_seen(config, tokens))


def training_flops(config: ModelConfig, tokens: int) -> int:
    """FLOPs of learning from one sequence of `tokens` tokens: forward and backward."""
    return 3 * forward_flops(config, tokens)


def _attention_flops(config: ModelConfig, pairs: int) -> int:
    """FLOPs of q·k and weight·v for `pairs` (query, key) pairs of positions, over all heads and layers."""
    return 4 * config.n_layers * config.n_heads * config.head_dim * pairs


def _visible_pairs(config: ModelConfig, tokens: int) -> int:
    """(query, key) pairs that the causal rule and the window leave: Σ over p < tokens of min(p + 1, window)."""
    window = keys_seen(config, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window


def keys_seen(config: ModelConfig, tokens: int) -> int:
    """How many of `tokens` tokens the last one sees, itself included: all, or as many as the sliding window holds."""
    return min(tokens, config.sliding_window) if config.sliding_window else tokens


def kv_bytes_per_token(config: ModelConfig, precision: str = "bf16") -> int:
    """Bytes of keys and values that each remembered token costs, over all layers."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * _bytes(precision)


def kv_bytes(config: ModelConfig, tokens: int, precision: str = "bf16") -> int:
    """Bytes of keys and values that attention can still reach after `tokens` tokens; a sliding window bounds them.

    A cache may hold more: `KVCache` has room beyond the window for the tokens of one call.
    """
    return keys_seen(config, tokens) * kv_bytes_per_token(config, precision)


def weight_bytes(config: ModelConfig, precision: str = "bf16") -> int:
    return total_parameters(config) * _bytes(precision)


def _bytes(precision: str) -> int:
    if precision not in BYTES:
        raise unknown_name("precision", precision, BYTES)
    return BYTES[precision]
