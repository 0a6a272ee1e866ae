"""Weights of a model that is whole on its rank: plain, compiled, or data-parallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollout.trainers.param_ref import ParamRef
from rollout.trainers.parameter_source import BUCKET_BYTES, ParameterSource
from rollout.trainers.ranks import Ranks


class HFSource(ParameterSource):
    """Streams the parameters themselves: nothing is gathered.

    Under DistributedDataParallel every rank takes part all the same, so that all learn of a
    failure; hand over its ``.module`` to stream from one rank alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        super().__init__(model, bucket_bytes=bucket_bytes, dtype=dtype)
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self.ranks = Ranks((module.process_group,))

    def gathered(self, refs: Sequence[ParamRef]) -> AbstractContextManager[list[torch.Tensor]]:
        return nullcontext([ref.parameter.detach() for ref in refs])
