"""Activation checkpointing: memory for time.

The backward pass needs what every block has computed. Kept, that is most of the memory of a step; here only each
block's input is, and the block is run once more when its gradient is due, with the same dropout. The loss and the
gradients are the same bits; a step takes about a third longer, as it has four passes instead of three.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

RunBlock = Callable[..., tuple[Tensor, Tensor]]


def recomputing(run_block: RunBlock) -> RunBlock:
    """A way to run a block as `run_block` does (see `Transformer.run_block`), keeping nothing but its inputs."""

    def run(*arguments: Any) -> tuple[Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return run_block(*arguments)
        return checkpoint(run_block, *arguments, use_reentrant=False)

    return run
