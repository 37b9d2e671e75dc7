"""Normalisation: bring every vector to the same energy before it is read.

RMSNorm divides by the root mean square and keeps the mean; LayerNorm subtracts the mean first. In half precision the
squares of small values vanish (1e-4² is 0 in fp16) and those of large ones overflow, so the statistic is always taken
in fp32 and only the result goes back to the input's type.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clockhand.config import ModelConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, the statistic in fp32 (Zhang & Sennrich 2019).

    Returns x's shape and type. This is the definition; `RMSNorm` calls torch's own, which is tested equal to it.
    """
    x32 = x if x.dtype == torch.float64 else x.float()
    normalised = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normalised.to(x.dtype) * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight"""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # (..., width) -> (..., width)
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias"""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:  # (..., width) -> (..., width)
        # torch's kernel takes the statistic in fp32 for half-precision inputs.
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)


def make_norm(config: ModelConfig, width: int) -> nn.Module:
    """The norm that the config names, over vectors of `width`."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(width, config.norm_eps)
