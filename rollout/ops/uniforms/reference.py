"""Counter-based noise in plain torch, whose int64 products wrap like unsigned ones."""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    keys_R = _mix(seeds_R + _GOLDEN)
    counters_R = _mix((positions_R + 1) * _GOLDEN)
    bits_R = _mix(_mix(keys_R ^ counters_R) + keys_R)
    return _shifted(bits_R, 11).double() * 2.0**-53


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
