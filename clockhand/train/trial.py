"""Steps of training on random ids: what a step costs, without a corpus and without a run folder.

`plan` forecasts with it and `bench` measures with it. The parts of a step are those of the loop, in its order.
"""

import torch

from clockhand.config import ModelConfig
from clockhand.data.loader import Batch
from clockhand.model.transformer import run_block
from clockhand.train.compiled import compile_blocks, running_blocks
from clockhand.train.config import TrainConfig
from clockhand.train.optim import clip_gradients, make_optimizer
from clockhand.train.parallel import Ranks
from clockhand.train.recompute import recomputing


class Trial:
    """A model with random weights and one batch of random ids. `config` must be settled (`settle.py`)."""

    def __init__(self, model: ModelConfig, config: TrainConfig) -> None:
        self.config = config
        self.model, self.loss_of = Ranks().build(model, config.seed, config.dtype, torch.device("cpu"))
        self.run_block = compile_blocks(self.model) if config.compile == "on" else run_block
        if config.checkpoint_activations:
            self.run_block = recomputing(self.run_block)
        self.optimizer = make_optimizer(self.model, config)
        ids = torch.randint(model.vocab_size, (config.batch_size, config.seq_len))
        self.batch = Batch(ids, ids, documents=None)

    def micro(self) -> None:
        """Forward and backward of one micro-batch."""
        with running_blocks(self.model, self.run_block):
            total, balance = self.loss_of(self.batch)
            (total / self.batch.ids.numel() + balance).backward()

    def update(self) -> None:
        clip_gradients(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        """All micro-batches of one update, and the update."""
        for _ in range(self.config.accumulate):
            self.micro()
        self.update()

    @torch.no_grad()
    def read(self) -> None:
        """Forward of one micro-batch alone, as an evaluation does it."""
        self.loss_of(self.batch)
