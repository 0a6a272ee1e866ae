"""Pairs of rows and experts, sorted by expert.

Legend: T rows, X experts per row, S = T * X pairs of both, N experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(kw_only=True, slots=True, eq=False)
class RowGroups:
    """Pair ``t * X + x`` is row t with its expert of rank x. Tensors are on one device.

    Expert n owns pairs_S[offsets[n] : offsets[n + 1]], ascending. Every pair has an owner.
    """

    pairs_S: torch.Tensor  # int64
    offsets_N1: torch.Tensor  # int32

    @property
    def experts_S(self) -> torch.Tensor:
        """The expert of each pair, int64 [S]."""
        places_S = torch.empty_like(self.pairs_S, dtype=torch.int32)
        order_S = torch.arange(len(places_S), dtype=torch.int32, device=places_S.device)
        places_S[self.pairs_S] = order_S
        return torch.searchsorted(self.offsets_N1, places_S, right=True) - 1
