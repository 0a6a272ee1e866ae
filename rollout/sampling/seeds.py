"""Request seeds: with the position, all that a token's noise depends on.

Nothing here depends on the batch, the draft, the worker, the rank or the device.
"""

from __future__ import annotations

import numpy as np

from rollout.ops.uniforms.reference import GOLDEN, mix

_MASK = 2**64 - 1


def split_mix(state: int) -> int:
    """SplitMix64's output for a state, which is taken modulo 2**64."""
    return _mixed(state + GOLDEN)


def _mixed(value: int) -> int:
    return int(mix(np.array([value & _MASK], dtype=np.uint64))[0])


def as_int64(seed: int) -> int:
    """The number in [-2**63, 2**63) with the seed's 64 bits, as JSON readers and Arrow hold it."""
    return (seed + 2**63) % 2**64 - 2**63


def derive_seed(run_seed: int, prompt_index: int, sample_index: int) -> int:
    """The request seed, in [0, 2**64): the same however a run is sharded, ordered or resumed."""
    state = split_mix(run_seed)
    for index in (prompt_index, sample_index):
        state = _mixed(state ^ (index + 1) * GOLDEN & _MASK)
    return state
