"""Counter-based randomness: every number is a pure function of (seed, position).

Nothing here depends on the batch, the draft, the worker, the rank or the device. The mixer is
SplitMix64's finalizer (Steele, Lea, Flood 2014), applied so that neighbouring positions of
neighbouring seeds come out unrelated.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """The noise with which request ``seeds_R[r]`` samples its token at ``positions_R[r]``.

    Args: seeds uint64 [R]; positions int64 [R], counted from the start of the whole sequence.
    Returns float64 [R] in [0, 1), 53 random bits each.
    """
    with np.errstate(over="ignore"):
        keys = _mix(seeds_R.astype(np.uint64) + _GOLDEN)
        counters = _mix((positions_R.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        bits = _mix(_mix(keys ^ counters) + keys)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """The request seed, in [0, 2**64): the same however a run is sharded, ordered or resumed."""
    with np.errstate(over="ignore"):
        state = _mix(np.array([run_seed & _MASK], dtype=np.uint64) + _GOLDEN)
        for index in (prompt_index, sample_index):
            state = _mix(state ^ (np.array([index + 1], dtype=np.uint64) * _GOLDEN))
    return int(state[0])
