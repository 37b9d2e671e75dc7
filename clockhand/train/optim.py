"""The optimizers, and what is done to gradients before they see them.

AdamW decays matrices only: a weight of two or more dimensions. Norm weights and biases set a scale or an offset, and
pulling those towards 0 regularises nothing. The embedding is such a matrix and decays with the others (as in GPT-2 and
nanoGPT); where the head is tied to it, the two are one parameter and decay once.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clockhand.errors import ClockhandError
from clockhand.train.config import TrainConfig
from clockhand.train.muon import Muon
from clockhand.train.parallel import gathered, sliced_like


class MuonWithAdamW:
    """Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.

    What Muon does to a matrix (`muon.py`) has no meaning for a table of rows or a vector.
    """

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        self.state = muon.state = adamw.state  # one memory: no parameter is in both

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


Optimizer = torch.optim.Optimizer | MuonWithAdamW


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """What `config` names, over all parameters of `model`."""
    parameters = list(model.parameters())  # a tied weight appears once
    if config.optimizer == "adamw":
        return _adamw(parameters, config)
    hidden = [p for name, p in model.named_parameters() if is_muons(name, p)]
    taken = set(hidden)
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    muon = Muon(hidden, config.learning_rate, config.weight_decay, dtype)
    return MuonWithAdamW(muon, _adamw([p for p in parameters if p not in taken], config))


def is_muons(name: str, parameter: Tensor) -> bool:
    """Whether Muon, where it is asked for, updates the parameter of this name."""
    return name.startswith("blocks.") and parameter.dim() == 2


def _adamw(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """AdamW in two groups: with decay and without."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.adam_eps,
        fused=True,  # one pass over memory instead of ten
    )


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Shortens the gradient of all parameters together to `max_norm` (0 is off). Returns its length before that.

    A length that is not finite is only reported, and the gradients left as they are. Of parameters that are sliced over
    several processes it is the length of the whole.
    """
    parameters = list(parameters)
    norm = gathered(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if max_norm > 0 and torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything the optimizer remembers, whole, under names like `exp_avg/blocks.0.mlp.up_proj.weight`."""
    return {
        f"{key}/{name}": gathered(tensor)
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer_tensors(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The reverse of `optimizer_tensors`, for a fresh optimizer. Raises `ClockhandError` for a name without a home."""
    parameters = dict(model.named_parameters())
    for path, tensor in tensors.items():
        key, _, name = path.partition("/")
        if name not in parameters:
            raise ClockhandError(f"the optimizer state holds '{path}' but the model has no parameter '{name}'")
        optimizer.state[parameters[name]][key] = sliced_like(parameters[name], tensor)
