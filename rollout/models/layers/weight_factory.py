"""WeightFactory: makes the weights of a network, all of one dtype and on one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from rollout.models.layers.linear import Linear
from rollout.parallel import ONE_RANK, ModelRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFactory:
    """How a network stores its weights. What it makes is undefined until written."""

    dtype: torch.dtype
    device: torch.device
    packing: bool = True  # whether products on the CPU may be packed
    ranks: ModelRanks = ONE_RANK  # that share the network
    exact: bool = True  # whether the bits are the same over any number of ranks
    stacked: bool | None = None  # whether experts' weights are one tensor; None: on a GPU
    region: Callable[[], AbstractContextManager[object]] = nullcontext  # that weights are made in

    def linear(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        table_OI: torch.Tensor | None = None,
    ) -> Linear:
        """A matrix product. ``dtype``: default: the network's."""
        with self.region():
            return Linear(
                inputs, outputs, bias=bias, dtype=dtype or self.dtype, device=self.device,
                packing=self.packing, table_OI=table_OI,
            )  # fmt: skip

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A parameter of this shape. ``dtype``: default: the network's."""
        with self.region():
            return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
