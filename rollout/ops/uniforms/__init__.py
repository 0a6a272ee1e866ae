"""The sampling noise of each row, on the device of its logits. R rows."""

from __future__ import annotations

import torch

from rollout.ops import gpu
from rollout.ops.uniforms import reference


def uniforms(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """Float64 [R] in [0, 1), bit for bit those of `rollout.sampling.noise.uniforms`.

    seeds_R: int64, the bits of the unsigned request seeds. positions_R: int64.
    """
    if gpu.runs_on(seeds_R.device):
        from rollout.ops.uniforms import triton

        return triton.uniforms(seeds_R, positions_R)
    return reference.uniforms(seeds_R, positions_R)
