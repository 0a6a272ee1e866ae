"""The dtypes of weights that this processor's oneDNN keeps in a layout of its own."""

import torch

from rollout.models.layers.packed_weight import PackedWeight


def packs(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are packed; bfloat16 takes a processor with AVX-512."""
    return PackedWeight.pack(torch.ones(8, 8, dtype=dtype)) is not None
