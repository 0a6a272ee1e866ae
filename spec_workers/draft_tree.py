"""Making DraftTrees of nothing but roots."""

from __future__ import annotations

import numpy as np

from rollout.types import DraftTrees


def only_roots(num_entries: int) -> DraftTrees:
    """No draft nodes at all: a step with these is plain decoding."""
    return DraftTrees(
        offsets_B1=np.zeros(num_entries + 1, dtype=np.int64),
        tokens_N=np.zeros(0, dtype=np.int32),
        parents_N=np.zeros(0, dtype=np.int32),
        depths_N=np.zeros(0, dtype=np.int32),
        masks_N=np.zeros(0, dtype=np.uint64),
        probs_N=np.zeros(0, dtype=np.float32),
        sources_N=np.zeros(0, dtype=np.uint8),
    )
