"""What `auto` means on this machine: precision and compilation, chosen by a short measurement.

No table of processors could know it: one CPU multiplies bf16 four times as fast as fp32, the next twice, another only
through emulation. So some products are made in both, for some milliseconds (`probe.py`). They are the same ones for
every model, so that the answer is the machine's and does not waver between two runs.

A run is settled once. What it was settled to stands in its checkpoints and holds for the whole run, or a resumed run
would not be bit for bit the straight one.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch

from clockhand.config import ModelConfig
from clockhand.count import training_flops
from clockhand.probe import matmul_flops
from clockhand.train.config import TrainConfig

SETTLED = ("dtype", "compile")
"""The fields that `settle` settles."""
WORTH_BF16 = 1.5
"""How much faster bf16 products must be: what is rounded to bf16 and back costs time as well."""
NARROW = 256
"""Models below this d_model stay in fp32 unless compiled. Their steps are made of conversions as much as of products:
at a width of 128 bf16 saves nothing uncompiled, and compiled 40 % of a step (LOG.md)."""
COMPILING = 20.0
"""Seconds that compiling a block takes, forward and backward, on a machine that has never done it (LOG.md)."""
SAVED_BY_COMPILING = 0.25
"""The share of a step that compiled blocks save, at least (LOG.md)."""
ACHIEVED = 0.5
"""The share of its matrix product speed that a machine reaches in an uncompiled step (LOG.md)."""


def settle(
    config: TrainConfig,
    model: ModelConfig,
    device: torch.device,
    mode: str = "none",
    earlier: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> TrainConfig:
    """`config` without any `auto`: as in `earlier`, the settings of the run that is resumed, or as measured now.

    `mode` is how ranks share the work (none | ddp | fsdp).
    """
    settled: dict[str, Any] = {}
    for name in SETTLED:
        if getattr(config, name) == "auto" and earlier is not None and name in earlier:
            settled[name] = earlier[name]
    config = dataclasses.replace(config, **settled)
    if "auto" not in (config.dtype, config.compile):
        return config
    speed = {dtype: matmul_flops(getattr(torch, dtype), device) for dtype in ("float32", "bfloat16")}
    gain = speed["bfloat16"] / speed["float32"]
    if config.compile == "auto":
        rows = config.batch_size * config.accumulate
        flops = training_flops(model, config.seq_len) * rows * config.steps
        dtype = config.dtype if config.dtype != "auto" else "bfloat16" if gain >= WORTH_BF16 else "float32"
        seconds = flops / speed[dtype] / ACHIEVED
        worth = can_compile(device) and mode != "fsdp" and seconds * SAVED_BY_COMPILING > 2 * COMPILING
        if worth:
            note(f"compile = on: costs about {COMPILING:.0f} s once in a run of some {seconds / 60:.0f} minutes")
        config = dataclasses.replace(config, compile="on" if worth else "off")
    if config.dtype == "auto":
        worth = gain >= WORTH_BF16 and (model.d_model >= NARROW or config.compile == "on")
        if worth:
            note(f"dtype = bfloat16: its products are {gain:.1f} × as fast as those of fp32 here")
        config = dataclasses.replace(config, dtype="bfloat16" if worth else "float32")
    return config


def can_compile(device: torch.device) -> bool:
    """Whether torch's compiler has what it needs: a C++ compiler for a CPU; for a GPU torch brings Triton with it."""
    return device.type == "cuda" or any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl"))
