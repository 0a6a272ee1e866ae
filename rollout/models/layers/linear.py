"""Linear: a matrix product with weights kept as its device likes them.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import linear

from rollout.models.layers.packed_weight import PackedWeight
from rollout.models.layers.storage import allocate_storage, free_storage
from rollout.models.layers.weight_loader import WeightLoader, fill
from rollout.ops.matmul import matmul
from rollout.ops.matmul.tiles import Tile

log = logging.getLogger(__name__)

_IN_CACHE = 1 << 19
"""Numbers moved at a time: converted or stored twice, they come from memory once."""


class Linear:
    """``y_MO = x_MI @ weight_OI.T + bias_O``.

    On the CPU the weight is packed into oneDNN's blocked layout and kept only there: reading the
    plain layout costs up to twice the time at few rows, and keeping both twice the memory. Until
    ``pack`` the weight is plain, and so it stays elsewhere or with ``packing=False``. It is written
    in place, packed or plain: its address does not change.

    ``table_OI`` ties the weight to a table that others read too (the embedding). The table stays
    plain, the packed weight is then a copy of it, and writes go to both.

    ``row_invariant``: plain products are those of ops.matmul, whose rows do not depend on their
    number; otherwise torch's own, which may be faster. ``left_out_tiles``: those that a GPU's do
    not use. Packed ones: see row_invariance, which says in ``min_rows`` from how many rows on
    they do not. Whoever calls with fewer pads them.
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
        self.row_invariant = False
        self.left_out_tiles: frozenset[Tile] = frozenset()
        self.min_rows = 1
        self.bias_O = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: PackedWeight | None = None
        self._table_OI = table_OI
        self._weight_OI = table_OI  # plain; None where only the packed one is kept
        if table_OI is None:
            self._weight_OI = torch.empty(out_features, in_features, dtype=dtype, device=device)

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        return self._product(x_MI, self.bias_O)

    def without_bias(self, x_MI: torch.Tensor) -> torch.Tensor:
        """``x_MI @ weight_OI.T``: where this is one term of a sum that the bias is added to."""
        return self._product(x_MI, None)

    def _product(self, x_MI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise.default(
                x_MI, self._packed.opaque, bias_O, "none", [], ""
            )
        assert self._weight_OI is not None
        if self.row_invariant:
            return matmul(x_MI, self._weight_OI, bias_O, self.left_out_tiles)
        return linear(x_MI, self._weight_OI, bias_O)

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def pack(self) -> None:
        """Pack what was written; stays plain where this build or processor cannot pack."""
        if self._packed is not None or not self.packing:
            return
        assert self._weight_OI is not None
        self._packed = PackedWeight.pack(self._weight_OI)
        if self._packed is not None:
            self._weight_OI = self._table_OI

    def release(self) -> int:
        """Free weight and bias, a table included; the bytes freed. Only ``allocate`` may follow."""
        freed = 0
        if self._packed is not None:
            freed += self._packed.num_bytes
            self._packed = None
        if self._weight_OI is not None:
            freed += free_storage(self._weight_OI)
        return freed if self.bias_O is None else freed + free_storage(self.bias_O)

    def allocate(self) -> None:
        """Memory again for what was released: plain, to be written to and packed."""
        if self._weight_OI is not None:
            allocate_storage(self._weight_OI)
        elif self._packed is None:
            shape = (self.out_features, self.in_features)
            self._weight_OI = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.bias_O is not None:
            allocate_storage(self.bias_O)

    def weight_rows(self, start: int, stop: int) -> WeightLoader:
        """Output features [start, stop) of the weight: all of it, or one part of a fused one."""

        def read() -> torch.Tensor:
            if self._weight_OI is not None:
                return self._weight_OI[start:stop].clone()
            assert self._packed is not None
            return self._packed.read(start, stop)

        return WeightLoader(
            shape=(stop - start, self.in_features),
            dtype=self.dtype,
            write=lambda values: self._write(start, values),
            read=read,
            place=(id(self if self._table_OI is None else self._table_OI), start),
        )

    def bias_rows(self, start: int, stop: int) -> WeightLoader:
        assert self.bias_O is not None
        return WeightLoader.of(self.bias_O[start:stop], (id(self.bias_O), start))

    def _write(self, start: int, values_MI: torch.Tensor) -> None:
        if self._packed is None:
            assert self._weight_OI is not None
            fill(self._weight_OI[start : start + len(values_MI)], values_MI)
            return
        values_MI = values_MI.detach()
        as_is = values_MI.dtype is self.dtype and values_MI.device == self.device
        if as_is and self._table_OI is None and values_MI.is_contiguous():
            self._packed.write(start, values_MI)
            return
        chunk = max(1, _IN_CACHE // max(1, self.in_features))
        for index, part_MI in enumerate(values_MI.split(chunk)):
            first = start + index * chunk
            plain_MI = part_MI.to(self.device, self.dtype).contiguous()
            if self._table_OI is not None:
                fill(self._table_OI[first : first + len(plain_MI)], plain_MI)
            self._packed.write(first, plain_MI)


def linear_weight_loaders(
    prefix: str, linear: Linear, widths: dict[str, int]
) -> dict[str, WeightLoader]:
    """A fused product's rows, part by part under the names checkpoints have for them."""
    found: dict[str, WeightLoader] = {}
    start = 0
    for name, width in widths.items():
        found[f"{prefix}.{name}.weight"] = linear.weight_rows(start, start + width)
        if linear.bias_O is not None:
            found[f"{prefix}.{name}.bias"] = linear.bias_rows(start, start + width)
        start += width
    return found


def sum_in_float32() -> None:
    """Tell cuBLAS to add the parts of a split product in float32 and to round once, in place of
    adding rounded parts. That holds for all of the process, a trainer's products included, from
    here on: nobody can tell when the last engine that wants it is gone, so nothing sets it back.
    """
    products = torch.backends.cuda.matmul
    if (
        products.allow_bf16_reduced_precision_reduction
        or products.allow_fp16_reduced_precision_reduction
    ):
        log.info(
            "exact=false: from now on cuBLAS adds the parts of 16-bit products in float32, in all "
            "of this process (torch.backends.cuda.matmul.allow_*_reduced_precision_reduction)"
        )
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
