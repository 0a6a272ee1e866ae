"""The experts of the token in each KV slot, for trainers that replay the router's choices.

Legend: S = num_slots + 1, T query rows, L sparse layers, X experts per token, C = L * X, P
positions.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.models.experts_config import ExpertsSpec


class RoutesPool:
    """A row of ``experts_SLX`` per KV slot, written by the forward that writes its keys and values.

    Cached prefixes and accepted draft nodes therefore have their routes. Stored on the host, in
    uint8 or int16. A forward's routes are copied asynchronously and stored when the pool is read or
    when the next forward's routes arrive.
    """

    def __init__(self, spec: ExpertsSpec, num_slots: int) -> None:
        self._shape = (num_slots + 1, len(spec.layers), spec.experts_per_token)
        self._dtype = _dtype(spec)
        self._pending: tuple[NDArray[np.int64], torch.Tensor] | None = None
        self._copied: torch.cuda.Event | None = None  # when what is pending is on the host
        self._experts_SLX: NDArray[np.integer]
        self.allocate()

    @staticmethod
    def bytes_per_slot(spec: ExpertsSpec) -> int:
        """Bytes of one slot's routes in all sparse layers."""
        return len(spec.layers) * spec.experts_per_token * _dtype(spec).itemsize

    def put(self, slots_T: NDArray[np.int64], routes_TC: torch.Tensor) -> None:
        """Store the routes of a forward whose rows wrote ``slots_T``, from `StepRoutes.joined`.

        ``routes_TC`` is copied and may be overwritten afterwards.
        """
        self._store_pending()
        experts_TLX = routes_TC.view(-1, *self._shape[1:]).to(self._dtype, copy=True)
        if experts_TLX.is_cuda:
            on_host = torch.empty(
                experts_TLX.shape, dtype=self._dtype, device="cpu", pin_memory=True
            )
            on_host.copy_(experts_TLX, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(experts_TLX.device))
            experts_TLX = on_host
        self._pending = slots_T, experts_TLX

    def read(self, slots_P: NDArray[np.int32]) -> NDArray[np.integer]:
        """The routes of these slots: a copy [P, L, X], uint8 or int16, the most probable expert
        first."""
        self._store_pending()
        return self._experts_SLX[slots_P]

    def release(self) -> int:
        """Free the memory; nothing may run until ``allocate``. Returns the bytes freed."""
        freed = self._experts_SLX.nbytes
        self._pending = None
        self._experts_SLX = self._experts_SLX[:0].copy()
        return freed

    def allocate(self) -> None:
        """Allocate the same slots again, filled with zeros."""
        kind = torch.empty(0, dtype=self._dtype).numpy().dtype
        self._experts_SLX = np.zeros(self._shape, dtype=kind)

    def _store_pending(self) -> None:
        if self._pending is not None:
            slots_T, experts_TLX = self._pending
            if self._copied is not None:
                self._copied.synchronize()
            self._experts_SLX[slots_T] = experts_TLX.numpy()
            self._pending = None


class StepRoutes:
    """A `RouteRecorder` of one forward. Sparse layers record in order, each once."""

    def __init__(self) -> None:
        self._layers: list[torch.Tensor] = []

    def record(self, layer: int, experts_TX: torch.Tensor) -> None:
        assert layer == len(self._layers)
        self._layers.append(experts_TX)

    def joined(self) -> torch.Tensor:
        """The routes of all layers: int32 [T, C], a row's layers side by side, C = L * X."""
        return torch.cat(self._layers, dim=1)


def _dtype(spec: ExpertsSpec) -> torch.dtype:
    """uint8, or int16 for more than 256 experts: torch cannot index with uint16."""
    return torch.uint8 if spec.num_experts <= 256 else torch.int16
