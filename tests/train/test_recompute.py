"""Activation checkpointing: the same bits with less kept."""

import dataclasses

import pytest
import torch

from clockhand.train.compiled import running_blocks
from clockhand.train.loop import Trainer
from clockhand.train.progress import Reporter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("experts", [0, 2])
def test_a_step_has_the_same_bits_and_keeps_less_for_its_backward_pass(
    experts, dtype, model_config, train_config, corpus, tmp_path
):
    config = dataclasses.replace(model_config, n_layers=4, n_experts=experts)
    assert config.dropout > 0

    def two_steps(checkpoint_activations: bool) -> tuple[list[float], torch.Tensor, int]:
        how = dataclasses.replace(train_config, checkpoint_activations=checkpoint_activations, dtype=dtype)
        trainer = Trainer(config, how, corpus, tmp_path / f"run-{checkpoint_activations}", Reporter())
        kept: dict[int, int] = {}  # bytes by address

        def keep(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with saving, running_blocks(trainer.model, trainer.run_block):
            trainer.loss_of(trainer.windows.batch(0))
        losses = [trainer.update()["train/loss"] for _ in range(2)]
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        return losses, weights, sum(kept.values())

    (losses, weights, kept), (same_losses, same_weights, less) = two_steps(False), two_steps(True)
    assert same_losses == losses
    assert torch.equal(same_weights, weights)
    assert less < 0.6 * kept
