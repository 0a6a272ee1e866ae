"""Rotary position embedding: its table for each way of stretching the context.

Legend: P positions, R rotary dims (cos half, then sin half), A angles (R / 2).
Sources: RoPE (Su et al. 2021); position interpolation (Chen et al. 2023) and NTK-aware scaling
(kaiokendev, bloc97, emozilla 2023); YaRN (Peng et al. 2023); Llama 3.1 (Meta 2024); LongRoPE
(Ding et al. 2024).
All angles are computed in float32, in the order of operations trainers use.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch


class RopeType(enum.StrEnum):
    """Ways of stretching the context, by their names in config.json."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters with the names of config.json. Those that a type does not use have defaults."""

    rope_type: RopeType = RopeType.DEFAULT
    rope_theta: float = 10_000.0
    factor: float = 1.0  # all but default: how far the context is stretched
    original_max_position_embeddings: int = 0  # dynamic and below: the context trained first
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    # yarn, longrope: scales cos and sin; None derives it from factor
    attention_factor: float | None = None
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope: of each wavelength, up to the original context
    long_factor: tuple[float, ...] = ()  # longrope: of each wavelength, beyond it


def cos_sin_table(
    rope: RopeSpec, head_dim: int, max_context_len: int, device: torch.device
) -> torch.Tensor:
    """Float32 [P, R] with P = max_context_len and R = head_dim: row p is cos, then sin.

    A row depends on its position alone. In transformers the dynamic NTK base follows the longest
    sequence so far; cached keys would then disagree with later queries. Here the base is that of
    ``max_context_len`` for the whole life of the engine. Up to the original context both agree. So
    do LongRoPE's factors, which transformers also changes when a sequence gets longer.
    """
    frequencies_A = _inverse_frequencies(rope, head_dim, max_context_len)
    positions_P = torch.arange(max_context_len, dtype=torch.float32)
    angles_PA = positions_P[:, None] * frequencies_A
    scale = _attention_factor(rope)
    return torch.cat([angles_PA.cos() * scale, angles_PA.sin() * scale], dim=-1).to(device)


def _inverse_frequencies(rope: RopeSpec, head_dim: int, max_context_len: int) -> torch.Tensor:
    exponents_A = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    theta = rope.rope_theta
    if rope.rope_type is RopeType.DYNAMIC:
        stretch = max(max_context_len / rope.original_max_position_embeddings, 1.0)
        theta *= (rope.factor * stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    wavelengths_A = theta**exponents_A  # positions per radian
    match rope.rope_type:
        case RopeType.DEFAULT | RopeType.DYNAMIC:
            return 1.0 / wavelengths_A
        case RopeType.LINEAR:
            return 1.0 / wavelengths_A / rope.factor
        case RopeType.LLAMA3:
            return _llama3(rope, 1.0 / wavelengths_A)
        case RopeType.YARN:
            return _yarn(rope, wavelengths_A, head_dim)
        case RopeType.LONGROPE:
            is_long = max_context_len > rope.original_max_position_embeddings
            factors_A = torch.tensor(rope.long_factor if is_long else rope.short_factor)
            return 1.0 / (factors_A * wavelengths_A)


def _llama3(rope: RopeSpec, frequencies_A: torch.Tensor) -> torch.Tensor:
    """Leave fast angles as they are, slow down slow ones by ``factor``, blend in between."""
    turns_A = rope.original_max_position_embeddings / (2 * math.pi / frequencies_A)
    blend_A = (turns_A - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended_A = (1 - blend_A) * frequencies_A / rope.factor + blend_A * frequencies_A
    slow_A = turns_A < rope.low_freq_factor
    fast_A = turns_A > rope.high_freq_factor
    return torch.where(
        slow_A, frequencies_A / rope.factor, torch.where(fast_A, frequencies_A, blended_A)
    )


def _yarn(rope: RopeSpec, wavelengths_A: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Ramp over the angles from those that turn beta_fast times to those that turn beta_slow."""

    def angle_of(turns: float) -> float:
        period = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.rope_theta))

    low, high = angle_of(rope.beta_fast), angle_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    indices_A = torch.arange(head_dim // 2, dtype=torch.float32)
    blend_A = 1 - ((indices_A - low) / width).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths_A) * (1 - blend_A) + 1.0 / wavelengths_A * blend_A


def _attention_factor(rope: RopeSpec) -> float:
    if rope.rope_type not in (RopeType.YARN, RopeType.LONGROPE):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type is RopeType.LONGROPE:
        stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_position_embeddings)
        return math.sqrt(1 + stretch)
    if rope.mscale and rope.mscale_all_dim:
        divisor = yarn_magnitude(rope.factor, rope.mscale_all_dim)
        return yarn_magnitude(rope.factor, rope.mscale) / divisor
    return yarn_magnitude(rope.factor, 1.0)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """YaRN's factor on queries and keys in a context stretched by ``factor``."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
