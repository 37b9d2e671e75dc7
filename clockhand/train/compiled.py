"""Blocks through torch's compiler: one block is compiled, and all layers run it.

The layers of a model differ in nothing but their weights, and weights are inputs of the compiled code. Twelve layers
unrolled into one graph compile twelve times as long and run no faster.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from clockhand.model.attend import Visibility
from clockhand.model.moe import MixtureOfExperts
from clockhand.model.transformer import Block, Transformer, run_block

Run = Callable[..., tuple[Tensor, Tensor]]


def compile_blocks(model: Transformer, backend: str = "inductor") -> Run:
    """A compiled `run_block`. Its first calls take some 10 to 20 seconds more (LOG.md). `backend` is torch's."""
    device = next(model.parameters()).device
    for module in model.modules():
        if isinstance(module, MixtureOfExperts) and not module.is_one_graph(device):
            # How many rows an expert gets is known only when it runs: what is left to compile is each expert.
            module.forward = torch.compiler.disable(module.forward, recursive=False)  # type: ignore[method-assign]
    compiled = torch.compile(run_block, backend=backend)

    def run(block: Block, x: Tensor, rotation: Any, sees: Visibility, *others: Any) -> tuple[Tensor, Tensor]:
        sees.bias  # noqa: B018 - made here, once, rather than within every layer
        return compiled(block, x, rotation, sees, *others)

    return run


@contextmanager
def running_blocks(model: Transformer, run: Run) -> Iterator[None]:
    """Within, `model` runs its blocks this way; evaluating and sampling are not within, and so need no compilation."""
    model.run_block = run
    try:
        yield
    finally:
        model.run_block = run_block
