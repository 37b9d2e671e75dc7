"""The decoder-only Transformer: ids in, scores for the next id out.

What is particular about this family:
  * norms before each part (or after it, for comparison), and the statistic always in fp32
  * positions enter as rotations of queries and keys, so only distances matter
  * a few KV heads serve many query heads
  * the MLP is gated, or is many experts of which each token visits a few
  * no biases unless asked for, and the head may be the embedding matrix itself

Read this file, then `attention.py`, then `attend.py`: that is the whole story, in the order a tensor lives it.

         ids (B, T)
          │ token_embedding
          x (B, T, D) ───┬──────────────────┐
          │              │ attention_norm   │
          │              │ attention        │
          + ◄────────────┘                  │  blocks × L
          │ ──────────────┐                 │
          │               │ mlp_norm        │
          │               │ mlp or experts  │
          + ◄─────────────┘ ────────────────┘
          │ final_norm
          │ lm_head
        logits (B, T, V)

The loss is in `train/loss.py`: this file does not know what the model is for.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.model.attend import Visibility
from clockhand.model.attention import Attention
from clockhand.model.cache import KVCache
from clockhand.model.mlp import make_mlp
from clockhand.model.moe import MixtureOfExperts
from clockhand.model.norm import make_norm
from clockhand.model.rope import rotation


class ModelOutput(NamedTuple):
    logits: Tensor  # (B, T, V)
    balance_loss: Tensor  # scalar fp32: balance_coef · sum over layers; 0 for a dense model


class HiddenOutput(NamedTuple):
    hidden: Tensor  # (B, T, D), what the head reads
    balance_loss: Tensor


class Block(nn.Module):
    """pre:   x = x + attention(norm(x));  x = x + mlp(norm(x))
    post:  x = norm(x + attention(x));  x = norm(x + mlp(x))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_norm = make_norm(config, config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = make_norm(config, config.d_model)
        self.mlp = MixtureOfExperts(config) if config.is_moe else make_mlp(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,  # (B, T, D)
        rotation: tuple[Tensor, Tensor] | None,
        sees: Visibility,
        is_token: Tensor | None,  # (B, T) bool, False at padding; None when there is none
        cache: KVCache | None,
        layer: int,
    ) -> tuple[Tensor, Tensor]:  # (B, T, D), and the balance loss of this layer
        pre = self.config.norm_position == "pre"
        attended = self.attention(self.attention_norm(x) if pre else x, rotation, sees, cache, layer)
        x = self._add(x, attended)
        if not pre:
            x = self.attention_norm(x)

        read = self.mlp_norm(x) if pre else x
        if isinstance(self.mlp, MixtureOfExperts):
            thought, balance = self.mlp(read, is_token)
        else:
            thought, balance = self.mlp(read), x.new_zeros((), dtype=torch.float32)
        x = self._add(x, thought)
        if not pre:
            x = self.mlp_norm(x)
        return x, balance

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        update = self.dropout(update)
        return x + update if self.config.residual else update


def run_block(block: Block, *arguments: Any) -> tuple[Tensor, Tensor]:
    """How a model runs each of its blocks, unless its `run_block` is set to another way (training compiles one)."""
    return block(*arguments)


class Transformer(nn.Module):
    """P(next id | ids so far) for every position at once."""

    def __init__(self, config: ModelConfig) -> None:
        """Weights are drawn from torch's global generator: seed it before."""
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.position == "learned"
        self.position_embedding = nn.Embedding(config.max_seq_len, config.d_model) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.run_block: Callable[..., tuple[Tensor, Tensor]] = run_block
        # A post-norm block ends in a norm of its own.
        self.final_norm = make_norm(config, config.d_model) if config.norm_position == "pre" else nn.Identity()
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie()
        initialise(self)

    def tie(self) -> None:
        """Makes the head the embedding matrix, if the config says so; again after the parameters were replaced."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations and of the cache: that of the weights, fp32 where their matrices are packed."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        ids: Tensor,  # (B, T) int64
        positions: Tensor | None = None,  # (B, T) int64, -1 at padding
        documents: Tensor | None = None,  # (B, T) int64, equal within a document
        cache: KVCache | None = None,
    ) -> ModelOutput:
        """Scores of the next id after every position. See `hidden` for the arguments."""
        hidden, balance_loss = self.hidden(ids, positions, documents, cache)
        # Gradients stop at a cache: what it holds has none, so a loss through it would be silently wrong.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            return ModelOutput(self.lm_head(hidden), balance_loss)

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> HiddenOutput:
        """The final hidden states; `lm_head` of them, or of a few of them, are the logits.

        positions default to 0, 1, 2, ..., restarting with each document, or to the continuation of each row of the
        cache. Padding has position -1: nothing sees it, no expert is visited by it, and what comes out there means
        nothing. With `documents`, tokens see only their own. With `cache`, the tokens are appended to it and no
        gradient is kept. Raises `ClockhandError` for ids beyond the vocabulary or more positions than there can be.
        """
        self._check(ids, positions, documents, cache)
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            padded = positions is not None and bool((positions < 0).any())
            in_order = positions is None and cache is None
            if positions is None:
                if documents is not None:
                    documents = documents_in_order(documents)
                positions = self._default_positions(ids, documents, cache)
            self._check_table(positions)
            sees = self._visibility(positions, documents, cache, in_order)
            is_token = positions >= 0 if padded else None

            x = self.token_embedding(ids)  # (B, T, D)
            if self.position_embedding is not None:
                x = x + self.position_embedding(positions.clamp(min=0))
            x = self.dropout(x)
            turned = None
            if self.config.position == "rope":
                turned = rotation(self.config, positions, self._lengths(positions, documents, cache))

            balance_loss = x.new_zeros((), dtype=torch.float32)
            for layer, block in enumerate(self.blocks):
                x, balance = self.run_block(block, x, turned, sees, is_token, cache, layer)
                balance_loss = balance_loss + balance
            return HiddenOutput(self.final_norm(x), self.config.balance_coef * balance_loss)

    def _check(self, ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: KVCache | None) -> None:
        if ids.dim() != 2 or ids.numel() == 0:
            raise ClockhandError(f"ids must have shape (batch, tokens), at least 1 of each, not {tuple(ids.shape)}")
        for name, numbers in (("ids", ids), ("positions", positions)):
            if numbers is not None and numbers.dtype not in (torch.int64, torch.int32):
                raise ClockhandError(f"{name} must be int64 or int32, not {numbers.dtype}")
        for name, other in (("positions", positions), ("documents", documents)):
            if other is not None and other.shape != ids.shape:
                raise ClockhandError(f"{name} has shape {tuple(other.shape)} but ids have {tuple(ids.shape)}")
        if documents is not None and cache is not None:
            raise ClockhandError("documents cannot be packed into a cache: give each document its own row")
        if cache is not None and cache.batch_size != ids.shape[0]:
            raise ClockhandError(f"a cache of {cache.batch_size} rows cannot take a batch of {ids.shape[0]}")
        if cache is not None:
            for name in ("n_layers", "n_kv_heads", "head_dim"):
                theirs, ours = getattr(cache.config, name), getattr(self.config, name)
                if theirs != ours:
                    raise ClockhandError(f"the cache was made for {name} = {theirs}, but this model has {ours}")
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            wrong = low if low < 0 else high
            size = self.config.vocab_size
            raise ClockhandError(f"id {wrong} is outside the vocabulary of {size} ids (0 to {size - 1})")

    def _check_table(self, positions: Tensor) -> None:
        rows = self.config.max_seq_len
        if self.config.position == "learned" and (last := int(positions.max())) >= rows:
            raise ClockhandError(f"position {last} is beyond the learned table of max_seq_len = {rows} rows")

    def _default_positions(self, ids: Tensor, documents: Tensor | None, cache: KVCache | None) -> Tensor:
        if cache is not None:
            return cache.next_positions(ids.shape[1])
        steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return steps if documents is None else positions_in_documents(documents)

    def _visibility(
        self, positions: Tensor, documents: Tensor | None, cache: KVCache | None, in_order: bool
    ) -> Visibility:
        window, tokens = self.config.sliding_window, positions.shape[1]
        key_positions = positions if cache is None else cache.begin(positions)
        # Rows that all count 0, 1, 2, ... have no padding, and nothing older in a cache.
        counts_up = bool((positions == torch.arange(tokens, device=positions.device)).all())
        causal = counts_up and documents is None and (window == 0 or window >= tokens)
        return Visibility(
            positions, key_positions, window, documents, documents, plainly_causal=causal, in_order=in_order
        )

    def _lengths(self, positions: Tensor, documents: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """The length of the sequence each token belongs to, (B, T) or (B, 1), for the scaling that asks for it."""
        if self.config.rope_scaling != "dynamic":
            return None
        if cache is not None:
            return torch.full_like(positions[:, :1], cache.max_seq_len)
        if documents is None:
            return positions.amax(-1, keepdim=True) + 1
        same = documents[:, :, None] == documents[:, None, :]  # (B, T, T)
        return positions[:, None, :].masked_fill(~same, -1).amax(-1) + 1


def documents_in_order(documents: Tensor) -> Tensor:
    """The documents of each row numbered 0, 1, 2, ... in their order, (B, T).

    An id that comes back after another is a document of its own: positions start again at 0 there, so were it the same
    document, the first part would see the second, which is its future.
    """
    begins = documents[:, 1:] != documents[:, :-1]
    return torch.cat((torch.zeros_like(documents[:, :1]), begins.cumsum(-1).to(documents.dtype)), dim=-1)


def positions_in_documents(documents: Tensor) -> Tensor:
    """The position of each token within its own document, (B, T), for documents packed one after another in a row."""
    steps = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return steps - (steps * starts).cummax(-1).values


def positions_of_padded(is_token: Tensor) -> Tensor:
    """Positions for rows with padding, (B, T): the tokens of each row count from 0, padding is -1.

    `is_token` (B, T) is true at tokens (Hugging Face's attention_mask).
    """
    is_token = is_token.bool()
    return (is_token.cumsum(-1) - 1).masked_fill(~is_token, -1)


def initialise(model: Transformer) -> None:
    """Draws all parameters, in their order."""
    for name, parameter in model.named_parameters():
        draw_parameter(model.config, name, parameter)


def draw_parameter(config: ModelConfig, name: str, parameter: Tensor) -> None:
    """All initial values in one place: those of the parameter that is called `name`.

    Matrices and embeddings are normal with `init_std`; the two projections that write into the residual stream are
    smaller by 1/√(2·layers), so that its variance does not grow with depth (Radford et al. 2019). Norms start at 1,
    biases at 0.
    """
    if name.endswith("bias"):
        nn.init.zeros_(parameter)
    elif parameter.dim() == 1:
        nn.init.ones_(parameter)
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        nn.init.normal_(parameter, std=config.init_std / math.sqrt(2 * config.n_layers))
    else:
        nn.init.normal_(parameter, std=config.init_std)


def without_weights(config: ModelConfig) -> Transformer:
    """The model with shapes but no storage, on the meta device, for weights to be assigned to."""
    with _NoInitialValues(), torch.device("meta"):
        return Transformer(config)


class _NoInitialValues(TorchFunctionMode):
    """Leaves out the drawing of initial values: without storage torch calls its compiler for it, a second to import."""

    DRAWING = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in self.DRAWING:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards, whatever happens within, for every module the mode it was in."""
    with modes_kept(model):
        model.eval()
        yield


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards every module is in training or in evaluation as it was before."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
