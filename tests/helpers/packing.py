"""The dtypes of weights that this processor's oneDNN keeps in a layout of its own."""

import torch

from rollout.models.layers.packed_weight import PackedWeight


def packs(dtype: torch.dtype) -> bool:
    """Bfloat16 is packed by processors with AVX-512 alone."""
    return PackedWeight.pack(torch.ones(8, 8, dtype=dtype)) is not None
