"""The two course chapters' own names, on this model.

    from clockhand.course import MiniLLaMAConfig, MiniLLaMAForCausalLM    # chapter A, Mini-LLaMA-0.04B
    from clockhand.course import ModelArgs, MiniMindModel                 # chapter B, MiniMind-3

    logits, loss, cache = MiniLLaMAForCausalLM(MiniLLaMAConfig())(ids, labels=ids)

What a reader types from a chapter works here, and no formula is written twice: a config becomes a `ModelConfig`, a
model holds a `Transformer` (as `model.transformer`, which the rest of clockhand takes), a function calls the one in
`clockhand.model`. Sizes are the chapters'. In a few places the chapters' listings slip, and these follow what the
chapters say rather than what they print:

  * Chapter A masks the future only when it is given no cache, so a prompt read into an empty cache sees its own
    future. Here a token never does, with a cache or without, one token at a time or many.
  * Chapter B turns the hidden states by their positions. Here queries and keys are turned, after they are split into
    heads, as its text explains. Pairs are adjacent dimensions, as in its `RotaryPositionEmbedding`.
  * Chapter B's block does not take the `num_experts` its model hands it, and its norms do not read `norm_eps`.
    Here both take effect.
  * Chapter B's model returns the logits alone. Here both models return (logits, loss, cache), to be unpacked alike.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clockhand.config import ModelConfig, check_types, require
from clockhand.errors import ClockhandError
from clockhand.model import attention, norm, transformer
from clockhand.model.attend import Visibility
from clockhand.model.cache import KVCache
from clockhand.model.mlp import SwiGLU
from clockhand.model.moe import route
from clockhand.model.rope import rotate, rotation
from clockhand.train.loss import IGNORE_INDEX, cross_entropy, next_token_targets

# ── configs ────────────────────────────────────────────────────────────────────────────────────────────────────────


# With slots, a misspelt `config.n_layer = 6` is an error instead of one more attribute that nobody reads.
@dataclass(slots=True)
class MiniLLaMAConfig:
    """Chapter A's model: 35,926,528 parameters. Raises `ClockhandError` for a value that cannot be."""

    vocab_size: int = 4096
    d_model: int = 512
    n_layers: int = 12
    n_q_heads: int = 8
    n_kv_heads: int = 2
    head_dim: int = 64
    d_ffn: int = 1408
    max_seq_len: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        self.to_model_config()

    def to_model_config(self) -> ModelConfig:
        ours = {"n_q_heads": "n_heads", "d_ffn": "d_ff", "tie_word_embeddings": "tie_embeddings"}
        return _translate(self, ours, rope_layout="half")


@dataclass(slots=True)
class ModelArgs:
    """Chapter B's model as its text has it: 75,707,136 parameters, head tied, no QK-norm.

    The published MiniMind-3 of 63,912,192 is narrower (hidden_dim 2432) and normalises queries and keys: that is
    clockhand's preset `minimind-3`, and this one is `minimind-3-textbook` but for the layout of the rotation.
    Raises `ClockhandError` for a value that cannot be.
    """

    dim: int = 768
    n_layers: int = 8
    n_heads: int = 8
    n_kv_heads: int = 4
    vocab_size: int = 6400
    max_seq_len: int = 32768
    hidden_dim: int = 3072
    rope_base: float = 1_000_000.0
    norm_eps: float = 1e-6
    num_experts: int | None = None
    """Experts of width hidden_dim, of which each token visits one. None is a dense model."""

    def __post_init__(self) -> None:
        self.to_model_config()

    def to_model_config(self) -> ModelConfig:
        ours = {"dim": "d_model", "hidden_dim": "d_ff", "rope_base": "rope_theta", "num_experts": "n_experts"}
        return _translate(self, ours, rope_layout="interleaved")


def _translate(config: MiniLLaMAConfig | ModelArgs, ours: dict[str, str], **settings: Any) -> ModelConfig:
    """`config` under our names; a refusal comes back under the chapter's."""
    values = {ours.get(name, name): value for name, value in dataclasses.asdict(config).items()}
    try:
        check_types(config)
        for name in ("n_kv_heads", "head_dim"):  # 0 would mean "derive it" to ModelConfig
            require(config, name, values.get(name, 1) >= 1, "at least 1")
        return ModelConfig(**{name: value for name, value in values.items() if value is not None}, **settings)
    except ClockhandError as error:
        message = str(error)
        for chapters_name, our_name in ours.items():
            message = re.sub(rf"\b{our_name}\b", chapters_name, message)
        raise ClockhandError(f"{message} (from {type(config).__name__})") from None


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class CourseOutput(NamedTuple):
    """`logits, loss, cache = model(ids)`"""

    logits: Tensor  # (B, T, V)
    loss: Tensor | None  # scalar, None without labels
    cache: KVCache | None  # None unless one was asked for


Past = KVCache | Sequence[tuple[None, None]] | None
"""What `past_key_values` may be: a `KVCache` to continue, or chapter A's start of one, `[(None, None)] * n_layers`."""


class _CourseModel(nn.Module):
    def __init__(self, config: MiniLLaMAConfig | ModelArgs) -> None:
        super().__init__()
        self.transformer = transformer.Transformer(config.to_model_config())

    @property
    def layers(self) -> nn.ModuleList:
        return self.transformer.blocks

    @property
    def norm(self) -> nn.Module:
        return self.transformer.final_norm

    @property
    def lm_head(self) -> nn.Linear:
        return self.transformer.lm_head

    def _run(self, ids: Tensor, labels: Tensor | None, past_key_values: Past, start_pos: int) -> CourseOutput:
        """Both chapters' forward: see `MiniLLaMAForCausalLM.forward`."""
        if start_pos < 0:
            raise ClockhandError(f"start_pos = {start_pos} must be 0 or more")
        cache = self._cache(past_key_values, len(ids))
        positions = None
        if cache is not None:
            if bool((cache.lengths != start_pos).any()):
                held = cache.lengths.unique().tolist()
                raise ClockhandError(
                    f"start_pos = {start_pos} must be {' and '.join(map(str, held))}, "
                    "the number of tokens that past_key_values holds"
                )
        elif start_pos:
            positions = torch.arange(start_pos, start_pos + ids.shape[-1], device=ids.device).expand_as(ids)
        if labels is not None:
            self._check_labels(labels, ids)

        logits, balance_loss = self.transformer(ids, positions=positions, cache=cache)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits, next_token_targets(labels)).mean + balance_loss
        return CourseOutput(logits, loss, cache)

    def _cache(self, past_key_values: Past, batch_size: int) -> KVCache | None:
        if past_key_values is None or isinstance(past_key_values, KVCache):
            return past_key_values
        n_layers, model = len(self.layers), self.transformer
        if list(past_key_values) != [(None, None)] * n_layers:
            raise ClockhandError(
                f"past_key_values must be the cache a call returned, or [(None, None)] * {n_layers} to start one"
            )
        return KVCache(model.config, batch_size, dtype=model.dtype, device=model.device)

    def _check_labels(self, labels: Tensor, ids: Tensor) -> None:
        if labels.shape != ids.shape:
            raise ClockhandError(f"labels have shape {tuple(labels.shape)} but ids have {tuple(ids.shape)}")
        size = self.transformer.config.vocab_size
        wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= size))]
        if wrong.numel():
            raise ClockhandError(f"label {int(wrong[0])} must be {IGNORE_INDEX} or an id from 0 to {size - 1}")


class MiniLLaMAForCausalLM(_CourseModel):
    """Chapter A's model. `model.transformer` is the same without the chapter's names."""

    def __init__(self, config: MiniLLaMAConfig) -> None:
        super().__init__(config)
        self.config = config

    @property
    def token_embeddings(self) -> nn.Embedding:
        return self.transformer.token_embedding

    def forward(
        self,
        input_ids: Tensor,  # (B, T) int64
        labels: Tensor | None = None,
        past_key_values: Past = None,
        start_pos: int = 0,
    ) -> CourseOutput:
        """Logits for the next id after every position, the loss if there are labels, the cache if one was given.

        labels (B, T) are the ids themselves, -100 where nothing is to be learned; the shift by one happens here. The
        loss is the mean over the tokens with a successor to predict (0 if none has), plus the balance loss of the
        experts if there are any. Gradients do not reach through a cache.
        past_key_values as in `Past`: the cache is filled in place and returned; `cache.copy()` first to branch off.
        start_pos is the position of the first id. With a cache it must be the number of tokens held.
        """
        return self._run(input_ids, labels, past_key_values, start_pos)


class MiniMindModel(_CourseModel):
    """Chapter B's model. `model.transformer` is the same without the chapter's names."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.args = args

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.token_embedding

    def forward(
        self,
        tokens: Tensor,  # (B, T) int64
        mask: None = None,
        labels: Tensor | None = None,
        past_key_values: Past = None,
        start_pos: int = 0,
    ) -> CourseOutput:
        """As `MiniLLaMAForCausalLM.forward`: (logits, loss, cache), where the chapter's model returns the logits alone.

        `mask` has its place but must be None: the model is causal by itself.
        """
        _refuse_mask(mask)
        return self._run(tokens, labels, past_key_values, start_pos)


def _refuse_mask(mask: object) -> None:
    if mask is not None:
        raise ClockhandError(
            "mask must be None: who sees whom is a rule on positions here, always causal, and not a matrix; "
            "for padding or packed documents give positions or documents to model.transformer"
        )


# ── building blocks ────────────────────────────────────────────────────────────────────────────────────────────────


class RMSNorm(norm.RMSNorm):
    """`RMSNorm(dim)`. Its scale is called `weight` as in chapter A; chapter B calls it gamma."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)


def precompute_freqs_cis(head_dim: int, max_seq_len: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each (T, Dh) fp32: one angle per pair, written twice, once for each half."""
    cos, sin = rotation(_one_head(head_dim, theta), torch.arange(max_seq_len)[None])  # (1, T, Dh/2)
    return cos[0].repeat(1, 2), sin[0].repeat(1, 2)


def rotate_half(x: Tensor) -> Tensor:
    """[x1, x2] -> [-x2, x1] over the last dimension: every clock hand a quarter turn on."""
    cos, sin = x.new_zeros(1, 1, 1), x.new_ones(1, 1, 1)
    return rotate(x.reshape(1, -1, 1, x.shape[-1]), cos, sin, "half").reshape(x.shape)


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns x (B, T, heads, Dh) by the tables of `precompute_freqs_cis`, cut to these T positions: (T, Dh)."""
    return rotate(x, *_angles(cos, sin), "half")


class RotaryPositionEmbedding(nn.Module):
    """Chapter B's rotation: dimension 2i is paired with 2i + 1."""

    def __init__(self, dim: int, max_seq_len: int = 32768, base: float = 1_000_000.0) -> None:
        """`dim` is the width of one head."""
        super().__init__()
        self.dim = dim
        cos, sin = rotation(_one_head(dim, base), torch.arange(max_seq_len)[None])  # (1, T, Dh/2)
        self.register_buffer("cos_cached", cos, persistent=False)
        self.register_buffer("sin_cached", sin, persistent=False)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:  # (B, heads, T, Dh) -> (B, heads, T, Dh)
        if x.shape[-2:] != (seq_len, self.dim):
            raise ClockhandError(
                f"x must have shape (batch, heads, {seq_len}, {self.dim}), not {tuple(x.shape)}: "
                "it is queries and keys that are turned, head by head, not hidden states"
            )
        cos, sin = self.get_buffer("cos_cached")[:, :seq_len], self.get_buffer("sin_cached")[:, :seq_len]
        return rotate(x.transpose(1, 2), cos, sin, "interleaved").transpose(1, 2)


class SwiGLUFeedForward(SwiGLU):
    """Chapter A's `SwiGLUFeedForward(config)`; w_gate, w_up, w_down are gate_proj, up_proj, down_proj."""

    def __init__(self, config: MiniLLaMAConfig | ModelArgs) -> None:
        super().__init__(config.to_model_config())


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    """(B, T, K, Dh) -> (B, T, K·n_rep, Dh), each head n_rep times in a row. Our attention groups heads instead."""
    return x.repeat_interleave(n_rep, dim=2)


def create_causal_mask(seq_len: int) -> Tensor:
    """The rule on positions as chapter B draws it: (T, T), 0 on and below the diagonal, -inf above."""
    return torch.zeros(seq_len, seq_len).masked_fill(~_causal(seq_len).mask[0], -math.inf)


class Attention(attention.Attention):
    """Chapter A's `Attention(config)`; wq, wk, wv, wo are q_proj, k_proj, v_proj, o_proj."""

    def __init__(self, config: MiniLLaMAConfig | ModelArgs) -> None:
        super().__init__(config.to_model_config())

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: None = None, kv_cache: None = None
    ) -> tuple[Tensor, None]:
        """x (B, T, D) from position 0 on, tables as in `apply_rotary_emb` -> (y, None): only models have a cache."""
        _refuse_mask(mask)
        _refuse_kv_cache(kv_cache)
        return super().forward(x, _angles(cos, sin), _causal(x.shape[1], x.device)), None


class TransformerBlock(transformer.Block):
    """Chapter A's `TransformerBlock(config)`, also of chapter B's ModelArgs."""

    def __init__(self, config: MiniLLaMAConfig | ModelArgs) -> None:
        super().__init__(config.to_model_config())

    def forward(  # type: ignore[override]
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: None = None, kv_cache: None = None
    ) -> tuple[Tensor, None]:
        """As `Attention.forward`."""
        _refuse_mask(mask)
        _refuse_kv_cache(kv_cache)
        y, _ = super().forward(x, _angles(cos, sin), _causal(x.shape[1], x.device), None, None, 0)
        return y, None


def top_k_routing(router_output: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    """Weights and indices (B, T, k) of the k most probable experts, weights summing to 1.

    router_output (B, T, E) holds probabilities, as chapter B's Router returns them. With k = 1 the weight is always 1:
    the language-model loss then says nothing to the router, and only the balance loss trains it.
    """
    # `route` wants logits; those of a softmax are its logarithm.
    routing = route(router_output.log().flatten(0, -2), k, renormalize=True)
    shape = (*router_output.shape[:-1], k)
    return routing.weights.reshape(shape), routing.experts.reshape(shape)


def _one_head(head_dim: int, theta: float) -> ModelConfig:
    """The smallest config with these clock hands."""
    return ModelConfig(vocab_size=1, d_model=head_dim, n_layers=1, n_heads=1, d_ff=1, rope_theta=theta)


def _angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The chapter's tables (T, Dh), in which both halves are the same, as ours: (1, T, Dh/2)."""
    return cos.chunk(2, dim=-1)[0][None], sin.chunk(2, dim=-1)[0][None]


def _causal(tokens: int, device: torch.device | None = None) -> Visibility:
    positions = torch.arange(tokens, device=device)[None]
    return Visibility(positions, positions, plainly_causal=True)


def _refuse_kv_cache(kv_cache: object) -> None:
    if kv_cache is not None:
        raise ClockhandError("kv_cache must be None: a cache belongs to a whole model, as its past_key_values")
