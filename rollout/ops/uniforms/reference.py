"""Counter-based noise in numpy, whose unsigned products wrap.

SplitMix64's finalizer (Steele, Lea, Flood 2014), applied so that neighbouring positions of
neighbouring seeds come out unrelated.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
_GOLDEN = np.uint64(GOLDEN)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer of each number."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise(seeds_R: NDArray[np.uint64], positions_R: NDArray[np.int64]) -> NDArray[np.float64]:
    """The noise with which request ``seeds_R[r]`` samples its token at ``positions_R[r]``."""
    keys_R = mix(seeds_R + _GOLDEN)
    counters_R = mix((positions_R.view(np.uint64) + np.uint64(1)) * _GOLDEN)
    bits_R = mix(mix(keys_R ^ counters_R) + keys_R)
    return (bits_R >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    found_R = noise(seeds_R.cpu().numpy().view(np.uint64), positions_R.cpu().numpy())
    return torch.from_numpy(found_R).to(seeds_R.device)
