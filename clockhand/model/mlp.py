"""The feed-forward part: where each token is thought about alone.

SwiGLU opens a gate with one projection and passes another through it; the plain MLPs have one projection and a bend.
The gate is not a valve between 0 and 1: SiLU(x) = x·σ(x) ranges from -0.278 upwards without limit.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.config import ModelConfig


class SwiGLU(nn.Module):
    """y = (SiLU(x·W_gate) ⊙ x·W_up)·W_down   (Shazeer 2020)"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MLP(nn.Module):
    """y = f(x·W_up)·W_down with f = GELU (x·Φ(x), exact) or ReLU"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = F.gelu if config.mlp == "gelu" else F.relu
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        return self.down_proj(self.activation(self.up_proj(x)))


def make_mlp(config: ModelConfig) -> nn.Module:
    """The dense MLP that the config names."""
    return SwiGLU(config) if config.mlp == "swiglu" else MLP(config)
