"""Matrix products of many experts, with weights stored to suit the device.

Legend: M rows of input, S pairs of a row and an expert, N experts, I input, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise

import torch

from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.ops.grouped_matmul import RowGroups, grouped_matmul
from rollout.ops.matmul.tiles import Tile


class GroupedLinear:
    """``y_SO = ops.grouped_matmul(x_MI, weights_NOI, groups)``.

    On the CPU there is a `Linear` per expert. Only experts with rows run, each over its own rows,
    padded to the number from which its product is row-invariant. Elsewhere all weights are one
    tensor.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        weights: WeightFactory,
        *,
        bias: bool = False,
    ) -> None:
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = weights.dtype
        self._linears: list[Linear] = []
        self._weights_NOI: torch.Tensor | None = None
        self._biases_NO: torch.Tensor | None = None
        if weights.device.type != "cpu" if weights.stacked is None else weights.stacked:
            self._weights_NOI = weights.tensor(num_experts, out_features, in_features)
            if bias:
                self._biases_NO = weights.tensor(num_experts, out_features)
        else:
            self._linears = [
                weights.linear(in_features, out_features, bias=bias) for _ in range(num_experts)
            ]

    def __call__(
        self, x_MI: torch.Tensor, groups: RowGroups, left_out: Set[Tile] = frozenset()
    ) -> torch.Tensor:
        """[S, O]. ``left_out``: tiles that a GPU must not use."""
        if self._weights_NOI is not None:
            y_SO = grouped_matmul(x_MI, self._weights_NOI, groups, left_out)
            return y_SO if self._biases_NO is None else y_SO + self._biases_NO[groups.experts_S]
        y_SO = x_MI.new_empty(len(groups.pairs_S), self.out_features)
        for linear, pairs in zip(self._linears, _pairs_of_experts(groups), strict=True):
            if len(pairs):
                rows = _padded(pairs // (len(y_SO) // len(x_MI)), linear.min_rows)
                y_SO[pairs] = linear(x_MI[rows])[: len(pairs)]
        return y_SO

    def linears(self) -> list[Linear]:
        """A product per expert; none if the weights are one tensor."""
        return self._linears

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer."""
        return [each for each in (self._weights_NOI, self._biases_NO) if each is not None]

    def weight_rows(self, expert: int, start: int, stop: int) -> WeightLoader:
        """A loader of output features [start, stop) of one expert's weight."""
        if self._weights_NOI is None:
            return self._linears[expert].weight_rows(start, stop)
        first = expert * self.out_features + start
        return WeightLoader.of(
            self._weights_NOI[expert, start:stop], (id(self._weights_NOI), first)
        )

    def bias_rows(self, expert: int, start: int, stop: int) -> WeightLoader:
        """A loader of output features [start, stop) of one expert's bias, which must exist."""
        if self._biases_NO is None:
            return self._linears[expert].bias_rows(start, stop)
        first = expert * self.out_features + start
        return WeightLoader.of(self._biases_NO[expert, start:stop], (id(self._biases_NO), first))

    def all_weights(self, parts: Sequence[str]) -> WeightLoader:
        """A loader of all weights as one tensor [N, O, I]. ``parts``: names of the single
        loaders."""
        experts = [self.weight_rows(n, 0, self.out_features) for n in range(self.num_experts)]

        def write(values_NOI: torch.Tensor) -> None:
            for expert, values_OI in zip(experts, values_NOI, strict=True):
                expert.write(values_OI)

        return WeightLoader(
            shape=(self.num_experts, self.out_features, self.in_features),
            dtype=self.dtype,
            write=write,
            read=lambda: torch.stack([expert.read() for expert in experts]),
            location=(id(self), 0),
            parts=tuple(parts),
        )


def _pairs_of_experts(groups: RowGroups) -> Iterator[torch.Tensor]:
    offsets = groups.offsets_N1.tolist()
    for start, end in pairwise(offsets):
        yield groups.pairs_S[start:end]


def _padded(rows: torch.Tensor, min_rows: int) -> torch.Tensor:
    """``rows`` with the last one repeated, at least ``min_rows`` in all."""
    missing = min_rows - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows[-1:].expand(missing)])
