"""Rotary positions: every pair of query/key dimensions is a clock hand turned by its position.

    pair i at position m:   [x1]    [cos m·θᵢ  -sin m·θᵢ] [x1]          θᵢ = base^(-2i/Dh)
                            [x2] →  [sin m·θᵢ   cos m·θᵢ] [x2]

Turning q by m and k by n leaves their product dependent on m - n alone (Su et al. 2021). The first hand turns once in
2π tokens, the last takes tens of thousands.

    frequencies(config)  θ of every pair, after the scaling that stretches the context
    rotation(...)        cos and sin of m·θ, always fp32: in bf16 position 1000 and 1001 would share an angle
    rotate(x, cos, sin)  turns the hands

Two layouts exist for which dimensions make a pair: `half` pairs i with i + Dh/2 (Hugging Face), `interleaved` pairs 2i
with 2i+1 (llama2.c). They are one permutation of the rows of q_proj and k_proj apart: see `half_to_interleaved`.
"""

import math

import torch
from torch import Tensor

from clockhand.config import ModelConfig


def frequencies(config: ModelConfig, lengths: Tensor | None = None) -> Tensor:
    """θ of every pair in radians per token, float64, (Dh/2,).

    `dynamic` scaling alone looks at `lengths`, the length of the sequence each token belongs to, in any shape that
    broadcasts with the positions, (B, T) or (B, 1); θ then has one more axis, (..., Dh/2).
    """
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float64)  # 2i
    plain = config.rope_theta ** (-pair / config.head_dim)  # (Dh/2,)
    factor, original = config.rope_factor, config.rope_original_max_seq_len
    # The exponent for which the slowest hand ends up exactly `factor` times slower, and the fastest unchanged.
    ntk = config.head_dim / (config.head_dim - 2) if config.head_dim > 2 else 1.0

    if config.rope_scaling == "none":
        return plain
    if config.rope_scaling == "linear":  # position interpolation, Chen et al. 2023
        return plain / factor
    if config.rope_scaling == "ntk":  # "NTK-aware": a larger base. Multiplying the base by `factor` is the crude form
        return (config.rope_theta * factor**ntk) ** (-pair / config.head_dim)
    if config.rope_scaling == "dynamic":  # NTK-aware with a factor that grows with the sequence
        if lengths is None:
            raise ValueError("dynamic scaling needs the sequence lengths")
        stretch = (factor * lengths.double().clamp(min=original) / original) - (factor - 1)
        base = config.rope_theta * stretch**ntk
        return base[..., None] ** (-pair / config.head_dim)
    if config.rope_scaling == "yarn":
        keep = 1 - yarn_ramp(config)
        return plain * keep + plain / factor * (1 - keep)
    # llama3: keep short wavelengths, divide long ones by the factor, blend between (Llama 3.1's reference code)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = original * plain / (2 * math.pi)  # how often each hand turns within the trained length
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def yarn_ramp(config: ModelConfig) -> Tensor:
    """YaRN's blend per pair, float64 (Dh/2,): 0 keeps the frequency, 1 divides it by the factor (Peng et al. 2023).

    The ramp runs between the pairs that turn beta_fast and beta_slow times within the trained length.
    """

    def pair_that_turns(times: float) -> float:
        turns_of_first = config.rope_original_max_seq_len / (times * 2 * math.pi)
        return config.head_dim * math.log(turns_of_first) / (2 * math.log(config.rope_theta))

    # The published code clamps to Dh - 1, not to the last pair Dh/2 - 1; parity needs the same.
    low = max(math.floor(pair_that_turns(config.rope_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(config.rope_beta_slow)), config.head_dim - 1)
    pair = torch.arange(config.head_dim // 2, dtype=torch.float64)
    return ((pair - low) / max(high - low, 0.001)).clamp(0, 1)


def attention_factor(config: ModelConfig) -> float:
    """What cos and sin are multiplied by: 1, or for YaRN the given factor, or 0.1·ln(factor) + 1 when none is given."""
    if config.rope_scaling != "yarn":
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    return 0.1 * math.log(config.rope_factor) + 1.0


def rotation(
    config: ModelConfig, positions: Tensor, lengths: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · θ, each (B, T, Dh/2), for `positions` (B, T).

    Angles are formed in float64, since at position 30,000 an fp32 product is already off by 1e-3 radians, and rounded
    once to `dtype`, which stays fp32 whatever the type of the model. `lengths` as in `frequencies`.
    """
    theta = frequencies(config, lengths.cpu() if lengths is not None else None)  # ([B, T or 1,] Dh/2)
    angles = positions.cpu().double()[..., None] * theta  # (B, T, Dh/2); on the CPU: MPS has no float64
    scale = attention_factor(config)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return cos.to(positions.device, dtype), sin.to(positions.device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Turns the pairs of x (B, T, heads, Dh) by the angles of cos and sin (B, T, Dh/2). Returns x's shape and type."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]  # (B, T, 1, Dh/2): the same for every head
    if layout == "half":
        x1, x2 = x.chunk(2, dim=-1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    else:
        x1, x2 = x[..., ::2], x[..., 1::2]
        turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    return turned.to(x.dtype)


def rotate_complex(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """`rotate` as Euler wrote it: each pair is a complex number, times e^{imθ}. The definition, kept for tests."""
    if layout == "half":
        pairs = torch.stack(x.chunk(2, dim=-1), dim=-1)  # (B, T, heads, Dh/2, 2)
    else:
        pairs = x.unflatten(-1, (-1, 2))
    wide = pairs.to(torch.promote_types(x.dtype, torch.float32))
    turned = torch.view_as_complex(wide.contiguous()) * torch.complex(cos, sin)[:, :, None, :].to(
        torch.complex128 if wide.dtype == torch.float64 else torch.complex64
    )
    turned = torch.view_as_real(turned).to(x.dtype)
    return turned.transpose(-1, -2).flatten(-2) if layout == "half" else turned.flatten(-2)


def half_to_interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of a q_proj or k_proj weight (heads·Dh, ...), or bias, from the half to the interleaved layout.

    With the rows moved and the layout switched, the model's attention scores are the same.
    """
    heads = rows.unflatten(0, (-1, 2, head_dim // 2))  # (heads, 2, Dh/2, ...)
    return heads.transpose(1, 2).flatten(0, 2)


def interleaved_to_half(rows: Tensor, head_dim: int) -> Tensor:
    """The inverse of `half_to_interleaved`."""
    heads = rows.unflatten(0, (-1, head_dim // 2, 2))  # (heads, Dh/2, 2, ...)
    return heads.transpose(1, 2).flatten(0, 2)
