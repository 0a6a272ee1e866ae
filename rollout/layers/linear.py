"""Linear: a matrix product with weights kept as its device likes them.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from rollout.layers.destination import Destination, fill


class Linear:
    """``y_MO = x_MI @ weight_OI.T + bias_O``.

    On the CPU the weight is packed into oneDNN's blocked layout and kept only there: reading the
    plain layout costs up to twice the time at few rows, and keeping both twice the memory. A
    write brings the plain weight back until ``pack`` is called; products are right in between.
    Elsewhere, or with ``packing=False``, the weight stays plain and is written in place, so that
    its address never changes.

    ``table_OI`` ties the weight to a table that others read too (the embedding). The table stays
    plain, the packed weight is then a copy of it, and writes go to the table.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        packing: bool = True,
        table_OI: torch.Tensor | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.device = device
        self.packing = packing
        self.bias_O = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self.is_packed = False
        self._table_OI = table_OI
        if table_OI is None:
            self._weight_OI = torch.empty(out_features, in_features, dtype=dtype, device=device)
        else:
            self._weight_OI = table_OI

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return torch.ops.mkldnn._linear_pointwise.default(
                x_MI, self._weight_OI, self.bias_O, "none", [], ""
            )
        return linear(x_MI, self._weight_OI, self.bias_O)

    def pack(self) -> None:
        """Pack what was written; stays plain where this build or processor cannot pack."""
        if self.is_packed or not self.packing:
            return
        packed_OI = _packed(self._weight_OI)
        if packed_OI is not None:
            self._weight_OI, self.is_packed = packed_OI, True

    def unpack(self) -> torch.Tensor:
        """The plain weight [O, I], to be written to; products use it until ``pack``."""
        if self.is_packed:
            table_OI = self._table_OI
            self._weight_OI = self._weight_OI.to_dense() if table_OI is None else table_OI
            self.is_packed = False
        return self._weight_OI

    def weight_rows(self, start: int, stop: int) -> Destination:
        """Output features [start, stop) of the weight: all of it, or one part of a fused one."""

        def read() -> torch.Tensor:
            if self._table_OI is not None:
                return self._table_OI[start:stop].clone()
            plain_OI = self._weight_OI.to_dense() if self.is_packed else self._weight_OI
            return plain_OI[start:stop].clone()

        return Destination(
            shape=(stop - start, self.in_features),
            dtype=self.dtype,
            write=lambda values: fill(self.unpack()[start:stop], values),
            read=read,
        )

    def bias_rows(self, start: int, stop: int) -> Destination:
        assert self.bias_O is not None
        return Destination.of(self.bias_O[start:stop])


def _packed(weight_OI: torch.Tensor) -> torch.Tensor | None:
    """The weight in oneDNN's layout, or None. The ops are private to torch, so may be absent."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    if reorder is None or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    try:
        packed_OI: torch.Tensor = reorder(weight_OI, None)
    except RuntimeError:  # this dtype on this processor
        return None
    # Reordering must lose nothing: reduced matmul precision could store float32 as bfloat16.
    lossless = packed_OI.is_mkldnn and _same_bits(packed_OI.to_dense(), weight_OI)
    return packed_OI if lossless else None


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise, so that NaN equals NaN: a diverged policy must pack like any other."""
    bits = torch.int16 if a.dtype.itemsize == 2 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))
