"""The optimizer: what decays, what is clipped, and that its memory survives being written down."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.model.transformer import Transformer
from clockhand.train.config import TrainConfig
from clockhand.train.optim import clip_gradients, load_optimizer_tensors, make_optimizer, optimizer_tensors

CONFIG = ModelConfig(
    vocab_size=50, d_model=16, n_layers=1, n_heads=2, d_ff=24, norm="layer", attention_bias="all", qk_norm=True
)


def with_zero_gradients(config: ModelConfig = CONFIG) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    return model


def test_matrices_decay_and_norms_and_biases_do_not():
    model = with_zero_gradients()
    make_optimizer(model, TrainConfig(learning_rate=0.1, weight_decay=0.5)).step()
    for name, parameter in model.named_parameters():
        decayed = parameter.dim() >= 2
        assert decayed == name.endswith(("_proj.weight", "embedding.weight")), name
        assert torch.allclose(parameter, torch.full_like(parameter, 0.95 if decayed else 1.0)), name


def test_a_tied_embedding_decays_once():
    model = with_zero_gradients()
    assert model.lm_head.weight is model.token_embedding.weight
    optimizer = make_optimizer(model, TrainConfig(learning_rate=0.1, weight_decay=0.5))
    optimizer.step()
    assert torch.allclose(model.lm_head.weight, torch.tensor(0.95))
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))


def test_clipping_reports_the_length_before_and_leaves_the_one_allowed():
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(4, 4, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    length = 2.0 * 19**0.5

    assert clip_gradients(parameters, max_norm=0) == pytest.approx(length)
    assert clip_gradients(parameters, max_norm=100) == pytest.approx(length)
    assert clip_gradients(parameters, max_norm=1) == pytest.approx(length)  # so neither call before has changed them
    assert clip_gradients(parameters, max_norm=0) == pytest.approx(1, abs=1e-5)  # torch divides by norm + 1e-6


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_with_its_memory_put_back_goes_on_as_the_first_one(name):
    def step(model, optimizer, gradient):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()

    config = TrainConfig(optimizer=name)
    first = with_zero_gradients()
    optimizer = make_optimizer(first, config)
    step(first, optimizer, 1.0)

    def resumed(memory):
        second = with_zero_gradients()
        second.load_state_dict(first.state_dict())
        other = make_optimizer(second, config)
        load_optimizer_tensors(second, other, memory)
        step(second, other, -0.5)
        return torch.cat([p.flatten() for p in second.parameters()])

    memory = {name: tensor.clone() for name, tensor in optimizer_tensors(first, optimizer).items()}
    again, forgetful = resumed(memory), resumed({})
    step(first, optimizer, -0.5)
    straight = torch.cat([p.flatten() for p in first.parameters()])
    assert torch.equal(again, straight)
    assert not torch.equal(forgetful, straight)  # control: without its memory it takes another step
