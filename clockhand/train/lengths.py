"""Loss against length: what a model makes of more context than it was trained with, and what the RoPE scalings repair.

Every window ends at the same places whatever its length, and the same last tokens of it are predicted, so only the
context changes. A scaling's factor is chosen for each length, as one would in use.

    context     |<-------- 4 L -------->|
                            |<-- 2 L -->|
                                  |< L >|
    predicted                         ===
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clockhand.config import CHOICES
from clockhand.errors import ClockhandError, unknown_name
from clockhand.model.packed import with_config
from clockhand.model.transformer import Transformer
from clockhand.train.evaluate import perplexity, rows_at_once
from clockhand.train.loss import cross_entropy

SCALINGS = ("none", "linear", "ntk", "dynamic", "yarn")
TARGETS = 32  # last tokens of each window that are predicted
WINDOWS = 16


@dataclass(frozen=True)
class LengthCurves:
    """What `losses_by_length` found."""

    trained: int
    """The length that the scalings start from."""
    lengths: list[int]
    losses: dict[str, list[float]]
    """For each scaling the nats per token at each length."""

    @property
    def perplexities(self) -> dict[str, list[float]]:
        return {scaling: list(map(perplexity, losses)) for scaling, losses in self.losses.items()}


def losses_by_length(
    model: Transformer, ids: Tensor, trained: int, scalings: Sequence[str] = SCALINGS, windows: int = WINDOWS
) -> LengthCurves:
    """The loss of `model` on `ids` (N,), read at ½, 1, 2 and 4 times the `trained` length, or as far as `ids` go.

    Raises `ClockhandError` for a model without plain RoPE, a scaling nobody knows, and a text too short to leave the
    trained length.
    """
    for scaling in scalings:
        if scaling not in CHOICES["rope_scaling"]:
            raise unknown_name("rope_scaling", scaling, CHOICES["rope_scaling"])
    position, own = model.config.position, model.config.rope_scaling
    if position != "rope" or own != "none":
        raise ClockhandError(f"position = {position}, rope_scaling = {own}: must be plain rope to be stretched")
    if trained < TARGETS:
        raise ClockhandError(f"a trained length of {trained} tokens must be at least {TARGETS}, the tokens predicted")
    room = len(ids) - TARGETS - 2
    if room <= 2 * trained:
        needed = f"more than {2 * trained + TARGETS + 2:,} are needed to leave the trained length of {trained:,}"
        raise ClockhandError(f"the text has {len(ids):,} tokens; {needed}")
    lengths = [each for each in (trained // 2, trained, 2 * trained, 4 * trained) if TARGETS <= each < room]
    losses = {each: loss_against_length(model, ids, trained, lengths, each, windows) for each in scalings}
    return LengthCurves(trained, lengths, losses)


@torch.no_grad()
def loss_against_length(
    model: Transformer, ids: Tensor, trained: int, lengths: list[int], scaling: str, windows: int = 48
) -> list[float]:
    """Nats per token on the same targets, read with contexts of each of `lengths` tokens.

    `ids` (N,) is held-out text, longer than the longest of `lengths` by 2 or more.
    """
    longest = max(lengths)
    ends = torch.linspace(longest + 1, len(ids) - 1, windows).long()
    losses = []
    for length in lengths:
        stretched = with_scaling(model, scaling, trained, length)
        total, count = 0.0, 0
        for batch in ends.split(rows_at_once(length)):
            rows = torch.stack([ids[end - length : end + 1] for end in batch.tolist()])  # (B, length + 1)
            hidden = stretched.hidden(rows[:, :-1]).hidden[:, -TARGETS:]
            summed = cross_entropy(stretched.lm_head(hidden), rows[:, 1:][:, -TARGETS:])
            total, count = total + float(summed.total), count + summed.count
        losses.append(total / count)
    return losses


def with_scaling(model: Transformer, scaling: str, trained: int, length: int) -> Transformer:
    """A model with the same weights, not copied, whose RoPE is stretched from `trained` to `length` by the named rule.

    Where nothing needs stretching it is not stretched.
    """
    if length <= trained:
        scaling = "none"
    changes: dict[str, Any] = {"rope_scaling": scaling, "max_seq_len": max(length, model.config.max_seq_len)}
    if scaling in ("linear", "ntk", "yarn", "llama3"):
        changes["rope_factor"] = length / trained
    if scaling == "dynamic":
        changes["rope_factor"] = 2.0
    if scaling in ("dynamic", "yarn", "llama3"):
        changes["rope_original_max_seq_len"] = trained
    plain = dict(rope_factor=1.0, rope_original_max_seq_len=0, rope_attention_factor=None)
    return with_config(model, dataclasses.replace(model.config, **{**plain, **changes})).eval()
