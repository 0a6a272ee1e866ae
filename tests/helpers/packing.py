"""Whether this processor packs weights, and multiplies them by tiles."""

import pytest
import torch

from rollout.models.layers.packed_weight import PackedWeight
from rollout.ops.tile_matmul import native as tiles

HAS_TILES = tiles.supports(torch.bfloat16, torch.device("cpu"))
"""Whether products of bfloat16 are by tiles, and none of them oneDNN's."""

needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="needs AMX")
needs_no_tiles = pytest.mark.skipif(
    HAS_TILES, reason="oneDNN multiplies by tiles here; test_instruction_sets runs it without"
)


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype; bfloat16 takes a processor with AVX-512."""
    return PackedWeight.pack(torch.ones(8, 8, dtype=dtype)) is not None
