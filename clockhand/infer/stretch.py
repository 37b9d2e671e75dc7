"""A longer context than a model was trained with: its RoPE stretched at inference, the weights as they are.

    max_seq_len = trained length · factor      (as it was, where that is more)

What each scaling does to the frequencies is in `model/rope.py`; what it does to the loss, `clockhand eval
--against-length` measures.
"""

import dataclasses
from typing import Any

from clockhand.config import CHOICES, ROPE_SCALING_FIELDS, ModelConfig
from clockhand.errors import ClockhandError, unknown_name
from clockhand.interop.minimind import INFERENCE_ROPE_SCALING
from clockhand.model.packed import with_config
from clockhand.model.transformer import Transformer


def stretched(
    model: Transformer,
    rope_scaling: str | None = None,
    rope_factor: float | None = None,
    inference_rope_scaling: bool = False,
    trained: int | None = None,
) -> Transformer:
    """The same weights, not copied, under another RoPE; the model itself where nothing is asked for.

    `rope_scaling` none takes off what the model has. The others start from the `trained` length (default: the model's
    max_seq_len). `inference_rope_scaling` is MiniMind's switch, YaRN from 2,048 tokens by 16. Raises `ClockhandError`
    for a model without RoPE or with a scaling of its own, and for settings that do not go together.
    """
    if rope_scaling is None and rope_factor is None and not inference_rope_scaling:
        return model
    config = stretched_config(model.config, rope_scaling, rope_factor, inference_rope_scaling, trained)
    return with_config(model, config)


def stretched_config(
    config: ModelConfig,
    rope_scaling: str | None,
    rope_factor: float | None,
    inference_rope_scaling: bool = False,
    trained: int | None = None,
) -> ModelConfig:
    """The config of `stretched`, from the config alone."""
    asked = "inference_rope_scaling" if inference_rope_scaling else f"rope_scaling = {rope_scaling}"
    if inference_rope_scaling and (rope_scaling is not None or rope_factor is not None):
        raise ClockhandError("inference_rope_scaling is a scaling and a factor: give no rope_scaling or rope_factor")
    if rope_scaling is None and not inference_rope_scaling:
        raise ClockhandError(f"rope_factor = {rope_factor} has no effect without rope_scaling")
    if rope_scaling is not None and rope_scaling not in CHOICES["rope_scaling"]:
        raise unknown_name("rope_scaling", rope_scaling, CHOICES["rope_scaling"])
    if config.position != "rope":
        raise ClockhandError(f"{asked} needs a model with RoPE, and this one has position = {config.position}")

    if rope_scaling == "none":
        if rope_factor is not None:
            raise ClockhandError(f"rope_factor = {rope_factor} has no effect with rope_scaling = none")
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(ModelConfig)}
        read = ROPE_SCALING_FIELDS[config.rope_scaling]
        return dataclasses.replace(config, rope_scaling="none", **{name: defaults[name] for name in read})

    if config.rope_scaling != "none":
        own = f"rope_scaling = {config.rope_scaling} by {config.rope_factor:g} in the model already"
        raise ClockhandError(f"{asked} would come on top of {own}, which only none takes off")
    if inference_rope_scaling:
        changes: dict[str, Any] = dict(INFERENCE_ROPE_SCALING)
        trained = changes["rope_original_max_seq_len"]
    else:
        if rope_factor is None:
            raise ClockhandError(f"{asked} needs rope_factor: by how much the context is stretched")
        trained = min(trained or config.max_seq_len, config.max_seq_len)
        changes = dict(rope_scaling=rope_scaling, rope_factor=float(rope_factor))
        if "rope_original_max_seq_len" in ROPE_SCALING_FIELDS[str(rope_scaling)]:
            changes["rope_original_max_seq_len"] = trained
    # A config that cannot be is refused before its factor makes a length of it.
    dataclasses.replace(config, **changes)
    reach = round(trained * changes["rope_factor"])
    return dataclasses.replace(config, **changes, max_seq_len=max(config.max_seq_len, reach))
