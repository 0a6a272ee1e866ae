"""A matrix product with weights stored to suit the device.

Legend: M rows, I input features, O output features.
"""

from __future__ import annotations

import logging

import torch
from torch.nn.functional import linear

from rollout.models.layers.packed_weight import PackedWeight
from rollout.models.layers.storage import allocate_storage, free_storage
from rollout.models.layers.tiled_weight import TiledWeight
from rollout.models.layers.weight_loader import WeightLoader, fill
from rollout.ops.matmul import matmul
from rollout.ops.matmul.tiles import Tile
from rollout.ops.panel_matmul import native

log = logging.getLogger(__name__)

FEW_ROWS = 48
"""Most rows that `panel_matmul` multiplies: 1.8x as fast as oneDNN at 1 to 4, 1.2x at 24, 1.1x at
48."""

_USUAL_SUM_BLOCK = 1024  # of oneDNN

_IN_CACHE = 1 << 19
"""Numbers written at a time: those converted or stored twice are then still in the cache."""


class Linear:
    """``y_MO = x_MI @ weight_OI.T + bias_O``.

    On the CPU, ``pack`` moves the weight into a blocked layout: the plain layout takes up to twice
    the time at few rows, and both together twice the memory. Before ``pack``, elsewhere, and with
    ``packing=False`` the weight is plain. It is written in place, packed or plain, so its address
    does not change. Where the processor has tiles for the dtype, packed weights are multiplied by
    `ops.tile_matmul`. Elsewhere the layout is oneDNN's, and so are products of more than `FEW_ROWS`
    rows; fewer are multiplied by `ops.panel_matmul` where that takes the weight.

    ``table_OI`` ties the weight to a table that others read too (the embedding). The table stays
    plain, the packed weight is a copy of it, and writes go to both.

    Attributes that `row_invariance` sets in exact mode:
        row_invariant: whether plain products are `ops.matmul`, which is row-invariant, instead of
            torch's own, which may be faster.
        left_out_tiles: tiles that a GPU's product does not use.
        min_rows: rows from which a packed product is row-invariant; callers pad fewer rows.
        sum_block: inputs that `ops.panel_matmul` sums in one chain, as oneDNN does; 0 where it
            multiplies nothing; None before ``pack``.

    ``next``: the product that probably follows in a forward; None for the last.
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
        self.sum_block: int | None = None
        self.bias_O = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._packed: PackedWeight | TiledWeight | None = None
        self._table_OI = table_OI
        self._weight_OI = table_OI  # plain; None if only the packed weight is stored
        if table_OI is None:
            self._weight_OI = torch.empty(out_features, in_features, dtype=dtype, device=device)

    def __call__(self, x_MI: torch.Tensor) -> torch.Tensor:
        if isinstance(self._packed, TiledWeight):
            return self._packed.multiply(x_MI, self.bias_O)
        if self._packed is not None:
            if self.sum_block and x_MI.shape[0] <= FEW_ROWS:
                panels_PUL = self._packed.panels_PUL
                assert panels_PUL is not None
                return native.panel_matmul(
                    x_MI, panels_PUL, self.out_features, self.bias_O, self.sum_block
                )
            return torch.ops.mkldnn._linear_pointwise.default(
                x_MI, self._packed.opaque, self.bias_O, "none", [], ""
            )
        assert self._weight_OI is not None
        if self.row_invariant:
            return matmul(x_MI, self._weight_OI, self.bias_O, self.left_out_tiles)
        return linear(x_MI, self._weight_OI, self.bias_O)

    @property
    def is_packed(self) -> bool:
        """Whether the weight is in a packed layout."""
        return self._packed is not None

    @property
    def multiplies_few_rows(self) -> bool:
        """Whether this package multiplies few rows with the packed weight: quick for any number."""
        return isinstance(self._packed, TiledWeight) or bool(self.sum_block)

    @property
    def writes_in_place(self) -> bool:
        """Whether writes keep the address of the weight that products read."""
        return not isinstance(self._packed, PackedWeight) or self._packed.panels_PUL is not None

    @property
    def multiplies_tiles(self) -> bool:
        """Whether rows are multiplied 16 at a time, so that padding to 16 costs nothing."""
        return isinstance(self._packed, TiledWeight)

    def pack(self) -> None:
        """Pack the weight, if this build and processor can; else it stays plain."""
        if self._packed is not None or not self.packing:
            return
        assert self._weight_OI is not None
        packed = TiledWeight.pack(self._weight_OI) or PackedWeight.pack(self._weight_OI)
        if packed is None:
            return
        self._packed, self._weight_OI = packed, self._table_OI
        if self.sum_block is None:  # not when it is packed again
            is_ours = isinstance(packed, PackedWeight) and packed.multiplies_few_rows
            self.sum_block = _USUAL_SUM_BLOCK if is_ours else 0

    def release(self) -> int:
        """Free weight, table and bias. Returns the bytes. Only ``allocate`` may be called next."""
        freed = 0
        if self._packed is not None:
            freed += self._packed.num_bytes
            self._packed = None
        if self._weight_OI is not None:
            freed += free_storage(self._weight_OI)
        return freed if self.bias_O is None else freed + free_storage(self.bias_O)

    def allocate(self) -> None:
        """Allocate released memory again: plain, undefined until written."""
        if self._weight_OI is not None:
            allocate_storage(self._weight_OI)
        elif self._packed is None:
            shape = (self.out_features, self.in_features)
            self._weight_OI = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.bias_O is not None:
            allocate_storage(self.bias_O)

    def weight_rows(self, start: int, stop: int) -> WeightLoader:
        """A loader of output features [start, stop) of the weight."""

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
            location=(id(self if self._table_OI is None else self._table_OI), start),
        )

    def bias_rows(self, start: int, stop: int) -> WeightLoader:
        """A loader of output features [start, stop) of the bias, which must exist."""
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
    """Loaders of a fused product's parts by checkpoint name.

    ``widths``: output features of each part by its name, in order.
    """
    found: dict[str, WeightLoader] = {}
    start = 0
    for name, width in widths.items():
        found[f"{prefix}.{name}.weight"] = linear.weight_rows(start, start + width)
        if linear.bias_O is not None:
            found[f"{prefix}.{name}.bias"] = linear.bias_rows(start, start + width)
        start += width
    return found


def sum_in_float32() -> None:
    """Make cuBLAS add the parts of a split product in float32 and round once.

    The setting belongs to the process, so it also affects a trainer's products. It is never undone:
    the last engine that needs it is unknown.
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
