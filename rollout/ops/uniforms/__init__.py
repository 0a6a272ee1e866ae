"""The sampling noise of each row, where its logits are. R rows.

Every number is a pure function of (seed, position): not of the batch, the draft, the worker, the
rank or the device.
"""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.uniforms import native, reference


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """Float64 [R] in [0, 1), 53 random bits each; the same bits on any device.

    seeds_R: int64, the bits of the unsigned request seeds. positions_R: int64, counted from the
    start of the whole sequence.
    """
    if gpu.runs_on(seeds_R.device):
        from rollout.ops.uniforms import triton

        return triton.uniforms(seeds_R, positions_R)
    if native.supports(seeds_R, positions_R):
        return native.uniforms(seeds_R, positions_R)
    return reference.uniforms(seeds_R, positions_R)
