"""What all foreign formats have in common: build a model strictly, refuse what a format cannot say, write files whole.

Each format's own file knows where its numbers lie; this one knows what must hold for all of them. Nothing is left at
random, nothing is dropped in silence, and a file is either the old one or the new one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.model.transformer import Transformer, without_weights

MOST_PARTS = 50_000
"""Layers times experts. Twice what the largest published model has; modules without weights need memory too."""


def assemble(
    config: ModelConfig, weight_of: Callable[[str], Tensor], source: object, dtype: torch.dtype | None = None
) -> Transformer:
    """The model of `config`, in evaluation mode, with the weight that `weight_of` gives for each of our names.

    It is asked for one tensor at a time, never for a tied head, and its answer is kept in `dtype` (None: as it is).
    Raises `ClockhandError` naming `source` and the tensor when one has another shape.
    """
    refuse_countless(config, source)
    try:
        model = without_weights(config)
    except (RuntimeError, TypeError, OverflowError):
        raise ClockhandError(f"{source} asks for tensors larger than there can be") from None
    for name, parameter in list(model.named_parameters()):
        weight = weight_of(name)
        if weight.shape != parameter.shape:
            shapes = f"{tuple(weight.shape)} but must have {tuple(parameter.shape)}"
            raise ClockhandError(f"{source}: {name} has shape {shapes}")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight.to(dtype or weight.dtype)))
    if config.tie_embeddings:
        model.lm_head.weight = model.token_embedding.weight
    return model.eval()


def refuse_countless(config: ModelConfig, source: object) -> None:
    """Raises `ClockhandError` for more layers and experts than any model has."""
    parts = config.n_layers * max(config.n_experts, 1)
    if parts > MOST_PARTS:
        raise ClockhandError(f"{source} asks for {parts} layers or experts, more than {MOST_PARTS}")


def refuse_others(config: ModelConfig, allowed: Mapping[str, Any], format: str) -> None:
    """Raises `ClockhandError` for the first field of `config` that is not as `format` takes for granted."""
    for name, value in allowed.items():
        values = value if isinstance(value, tuple) else (value,)
        if getattr(config, name) not in values:
            known = " or ".join(str(each) for each in values)
            value = f"{name} = {getattr(config, name)}"
            raise ClockhandError(f"{value} does not fit into {format}, which has no place for it and means {known}")
