"""What all foreign formats have in common: build a model strictly, refuse what a format cannot say, write files whole.

Each format's own file knows where its numbers lie; this one knows what must hold for all of them. Nothing is left at
random, nothing is dropped in silence, and a file is either the old one or the new one.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.model.transformer import Transformer


def assemble(
    config: ModelConfig, weights: Iterable[tuple[str, Tensor]], source: object, dtype: torch.dtype | None = None
) -> Transformer:
    """The model of `config` with `weights` under our names, in `dtype` (None keeps each tensor's own).

    `weights` is consumed one tensor at a time and may be a generator. A tied head is not among them. Raises
    `ClockhandError` naming `source` and the tensor that is missing, surplus, repeated or of another shape.
    """
    with torch.device("meta"):  # no memory, and no time spent on initial values that are thrown away
        model = Transformer(config)
    wanted = dict(model.named_parameters())
    for name, weight in weights:
        if name not in wanted:
            raise ClockhandError(f"{source}: tensor {name} is not one of this model's, or is there twice")
        shape = wanted.pop(name).shape
        if weight.shape != shape:
            raise ClockhandError(f"{source}: {name} has shape {tuple(weight.shape)} but must have {tuple(shape)}")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight.to(dtype or weight.dtype)))
    if wanted:
        raise ClockhandError(f"{source}: {len(wanted)} tensors are missing, the first is {next(iter(wanted))}")
    if config.tie_embeddings:
        model.lm_head.weight = model.token_embedding.weight
    return model


def refuse_others(config: ModelConfig, allowed: Mapping[str, Any], format: str) -> None:
    """Raises `ClockhandError` for the first field of `config` that is not as `format` takes for granted."""
    for name, value in allowed.items():
        values = value if isinstance(value, tuple) else (value,)
        if getattr(config, name) not in values:
            known = " or ".join(str(each) for each in values)
            raise ClockhandError(
                f"{name} = {getattr(config, name)} cannot be exported: {format} has no place for it and means {known}"
            )


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. It takes the place of `path` when the block ends well, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
