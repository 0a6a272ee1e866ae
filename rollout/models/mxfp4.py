"""MXFP4 weights (OCP Microscaling Formats 2023), as gpt-oss checkpoints store their experts.

Legend: N experts, O outputs, G groups of 32 inputs, I inputs = 32 G.
"""

from __future__ import annotations

import torch

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of a weight's two tensors."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a scale's exponent


def mxfp4_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The weight's shape [N, I, O] from that of its blocks, [N, O, G, 16]."""
    experts, outputs, groups, size = blocks
    return (experts, groups * size * 2, outputs)


def dequantised(blocks_NOGB: torch.Tensor, scales_NOG: torch.Tensor) -> torch.Tensor:
    """The weight [N, I, O] in bfloat16, which holds every value, as a view with I last in memory.

    A byte of ``blocks`` is two numbers of a sign and three bits, the first one in its lower half.
    """
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16)
    experts, inputs, outputs = mxfp4_shape(tuple(blocks_NOGB.shape))
    weight_NOI = torch.empty(experts, outputs, inputs, dtype=torch.bfloat16)
    for weight_OI, blocks_OGB, scales_OG in zip(weight_NOI, blocks_NOGB, scales_NOG, strict=True):
        pairs_OGB2 = torch.stack((blocks_OGB & 15, blocks_OGB >> 4), dim=-1)
        numbers_OGI = values[pairs_OGB2.int()].flatten(2)
        scaled_OGI = torch.ldexp(numbers_OGI.float(), scales_OG.int()[..., None] - _BIAS)
        weight_OI.copy_(scaled_OGI.flatten(1))
    return weight_NOI.mT
