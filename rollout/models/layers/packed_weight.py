"""A weight in oneDNN's packed layout, whose rows can be rewritten in place.

Legend: M rows, O output features, I input features, P panels, U units, L a unit of 64 rows (see
rollout.ops.panels).
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from rollout.models.layers.storage import prefer_huge_pages
from rollout.ops.panel_matmul import native
from rollout.ops.panels import LANES, read_panels, write_panels


class PackedWeight:
    """The packed weight, ``opaque``, and a view of its memory, valid as long as ``opaque`` lives.

    With the known layout, writes go into the packed memory and its address never changes. Packing
    anew takes memory for a second copy and ten times as long, nearly all of it page faults; a write
    does that only if the layout is unknown.
    """

    def __init__(self, weight_OI: torch.Tensor, opaque: torch.Tensor) -> None:
        """``opaque``: the weight as oneDNN reordered it."""
        self._take(opaque)
        self.panels_PUL = _panels(opaque)
        if self.panels_PUL is not None and not _same_bits(self._unpacked(), weight_OI):
            self.panels_PUL = None

    @staticmethod
    def pack(weight_OI: torch.Tensor) -> PackedWeight | None:
        """Pack a weight. None if this build or processor cannot pack without loss."""
        opaque = _reordered(weight_OI)
        # Reduced matmul precision could have stored float32 as bfloat16.
        if opaque is None or not _same_bits(opaque.to_dense(), weight_OI):
            return None
        return PackedWeight(weight_OI, opaque)

    def _take(self, opaque: torch.Tensor) -> None:
        """Store a packed weight [O, I], of layout torch._mkldnn."""
        self.opaque = opaque
        self.num_bytes = int(torch.ops.mkldnn._nbytes(opaque))  # padding included
        prefer_huge_pages(torch.ops.mkldnn.data_ptr(opaque), self.num_bytes)

    @property
    def multiplies_few_rows(self) -> bool:
        """Whether `ops.panel_matmul` takes this weight, and rows of its dtype."""
        return self.panels_PUL is not None and native.supports(
            torch.empty(1, self.opaque.shape[1], dtype=self.opaque.dtype), self.panels_PUL
        )

    def write(self, first_row: int, rows_MI: torch.Tensor) -> None:
        """Replace rows from ``first_row`` on by contiguous CPU rows of the same dtype."""
        if self.panels_PUL is not None:
            write_panels(self.panels_PUL, first_row, rows_MI)
        else:
            weight_OI = self.opaque.to_dense()
            weight_OI[first_row : first_row + len(rows_MI)] = rows_MI
            self._take(torch.ops.mkldnn._reorder_linear_weight(weight_OI, None))

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A plain copy of rows [start, stop)."""
        if self.panels_PUL is None:
            return self.opaque.to_dense()[start:stop].clone()
        rows_MI = torch.empty((stop - start, self.opaque.shape[1]), dtype=self.opaque.dtype)
        read_panels(self.panels_PUL, start, rows_MI)
        return rows_MI

    def _unpacked(self) -> torch.Tensor:
        return self.read(0, self.opaque.shape[0])


def _reordered(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's layout, or None if torch lacks the private ops or refuses."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    ops = torch.ops.mkldnn
    names = ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")
    if not all(hasattr(ops, name) for name in names):
        return None
    try:
        opaque: torch.Tensor = ops._reorder_linear_weight(weight_OI, None)
    except RuntimeError:  # this dtype on this processor
        return None
    return opaque if opaque.is_mkldnn else None


def _panels(opaque: torch.Tensor) -> torch.Tensor | None:
    """The memory of a packed weight as panels; None if its size does not fit panels."""
    elements = 4 // opaque.dtype.itemsize
    num_panels = -(-opaque.shape[0] // LANES)
    unit_bytes = LANES * elements * opaque.dtype.itemsize
    num_bytes: int = torch.ops.mkldnn._nbytes(opaque)
    units, rest = divmod(num_bytes, num_panels * unit_bytes)
    if rest or units * elements < opaque.shape[1]:
        return None
    address: int = torch.ops.mkldnn.data_ptr(opaque)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    flat = torch.from_numpy(memory).view(opaque.dtype)
    return flat.view(num_panels, units, LANES * elements)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are bitwise equal. NaN equals NaN: a diverged policy must pack too."""
    bits = torch.int16 if a.dtype.itemsize == 2 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))
