"""The matrix products of attention heads, each with its own weight, stored to suit the device.

Legend: T rows, H heads, I input, O output features.
"""

from __future__ import annotations

from collections.abc import Set

import torch

from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader, fill
from rollout.ops.grouped_matmul import RowGroups, grouped_matmul
from rollout.ops.head_matmul import head_matmul
from rollout.ops.matmul.tiles import Tile


class HeadLinear:
    """``y[:, h] = x[:, h] @ weight[h].T``.

    On the CPU weights are [H, I, O], and one call multiplies all heads. On a GPU they are
    [H, O, I], and a head's rows are an expert's.
    """

    def __init__(
        self, num_heads: int, in_features: int, out_features: int, weights: WeightFactory
    ) -> None:
        self.num_heads = num_heads
        self.in_features = in_features
        self.out_features = out_features
        self._transposed = weights.device.type == "cpu"
        sizes = (in_features, out_features) if self._transposed else (out_features, in_features)
        self.weights = weights.tensor(num_heads, *sizes)

    def __call__(
        self,
        x_THI: torch.Tensor,
        out_THO: torch.Tensor | None = None,
        left_out: Set[Tile] = frozenset(),
    ) -> torch.Tensor:
        """[T, H, O].

        Args:
            out_THO: where the result goes, may be strided; default: a new tensor.
            left_out: tiles that a GPU must not use.
        """
        if self._transposed:
            return head_matmul(x_THI, self.weights, out_THO)
        rows, heads, inputs = x_THI.shape
        pairs_S = torch.arange(rows * heads, device=x_THI.device).view(rows, heads)
        offsets_N1 = torch.arange(heads + 1, dtype=torch.int32, device=x_THI.device) * rows
        groups = RowGroups(pairs_S=pairs_S.t().flatten(), offsets_N1=offsets_N1)
        x_SI = x_THI.reshape(rows * heads, inputs)
        y_THO = grouped_matmul(x_SI, self.weights, groups, left_out).view(rows, heads, -1)
        return y_THO if out_THO is None else out_THO.copy_(y_THO)

    def head(self, index: int) -> WeightLoader:
        """A loader of one head's weight, [O, I]."""
        weight = self.weights[index].t() if self._transposed else self.weights[index]
        return WeightLoader(
            shape=(self.out_features, self.in_features),
            dtype=weight.dtype,
            write=lambda values_OI: fill(weight, values_OI),
            read=lambda: weight.clone(memory_format=torch.contiguous_format),
            location=(id(self), index * self.out_features),
        )
