"""The products of a trainer's modules in the engine's order.

On a CPU weights are packed anew for each forward, a small part of its time: whether a
trainer has written to a parameter cannot be told. A GPU multiplies by the parameters themselves.

Legend: M rows, S pairs of a row and an expert, I input features, O output features, N experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear as plain_linear

from rollout.errors import ExactnessError, InvalidInputError
from rollout.models.layers.grouped_linear import GroupedLinear
from rollout.models.layers.linear import Linear
from rollout.models.layers.row_invariance import dependent_on_outputs, make_row_invariant
from rollout.models.layers.weight_factory import WeightFactory
from rollout.ops.grouped_matmul import RowGroups, grouped_matmul
from rollout.ops.matmul import matmul
from rollout.trainers.exact.functions import product

_MAX_ROWS = 2048  # of a product on a CPU: so many were compared with fewer


class ExactLinear:
    """The product with a module's ``weight`` and, if it has one, ``bias``."""

    def __init__(self, module: Any, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        """``dtype``: of the forward."""
        device = module.weight.device
        self._module = module
        has_bias = getattr(module, "bias", None) is not None
        # On a GPU it stands for the product's shape alone.
        none = None if device.type == "cpu" else torch.empty(0, dtype=dtype, device=device)
        self.linear = Linear(
            inputs, outputs, bias=has_bias, dtype=dtype, device=device, table_OI=none
        )
        _pack([self.linear])

    @staticmethod
    def of(module: nn.Linear, dtype: torch.dtype) -> ExactLinear:
        """The product of a linear module."""
        return ExactLinear(module, module.in_features, module.out_features, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O]."""
        return self.apply(x, self._module.weight, getattr(self._module, "bias", None))

    def apply(
        self, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        """The product with a weight and a bias that are computed from parameters.

        Raises InvalidInputError for sharded parameters, and for other dtypes than the forward's.
        """
        linear = self.linear
        shape = (linear.out_features, linear.in_features)
        require_whole(weight_OI, shape)
        require_dtype(linear.dtype, input=x, weight=weight_OI)
        if linear.is_packed:
            linear.weight_rows(0, linear.out_features).write(weight_OI.detach())
            if bias_O is not None:
                linear.bias_rows(0, linear.out_features).write(bias_O.detach())

        def multiply(x_MI: torch.Tensor) -> torch.Tensor:
            if linear.is_packed:
                return _packed_product(linear, x_MI)
            if linear.row_invariant:
                return matmul(x_MI, weight_OI.detach(), bias_O, linear.left_out_tiles)
            return plain_linear(x_MI, weight_OI, bias_O)

        return product(multiply, x, weight_OI, bias_O)


class ExactGrouped:
    """The products of rows with their experts' weights."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """``shape``: N, O, I."""
        self._shape, self._dtype = shape, dtype
        self._packed: GroupedLinear | None = None
        if device.type == "cpu":
            experts, outputs, inputs = shape
            factory = WeightFactory(dtype=dtype, device=device)
            self._packed = GroupedLinear(experts, inputs, outputs, factory)
            _pack(self._packed.linears())

    def linears(self) -> list[Linear]:
        """On a CPU a product for each expert."""
        return [] if self._packed is None else self._packed.linears()

    def multiply(
        self, x_MI: torch.Tensor, weights_NOI: torch.Tensor, groups: RowGroups, like: Linear
    ) -> torch.Tensor:
        """[S, O]. ``like``: a product of the same dtype, which knows the tiles to leave out."""
        require_whole(weights_NOI, self._shape)
        require_dtype(self._dtype, input=x_MI, weight=weights_NOI)
        if self._packed is None:
            return grouped_matmul(x_MI, weights_NOI.detach(), groups, like.left_out_tiles)
        self._packed.all_weights(()).write(weights_NOI.detach())
        return self._packed(x_MI, groups)


def make_exact(linears: Sequence[Linear]) -> None:
    """Make products independent of the numbers of rows and outputs.

    Raises ExactnessError where this machine's cannot be: the engine multiplies some together.
    """
    make_row_invariant(linears, _MAX_ROWS)
    if dependent := dependent_on_outputs(linears):
        shapes = ", ".join(f"{each.in_features} -> {each.out_features}" for each in dependent)
        raise ExactnessError(
            f"exact training: on this machine a product's bits depend on its number of outputs "
            f"({shapes} in {dependent[0].dtype}), and the engine joins products"
        )


def require_whole(weight: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise InvalidInputError for a parameter whose values are on other ranks."""
    if hasattr(weight, "full_tensor") or tuple(weight.shape) != shape:
        raise InvalidInputError(
            "model", list(weight.shape), f"a weight of {list(shape)} is sharded during the forward"
        )


def require_dtype(dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    """Raise InvalidInputError unless tensors, and autocast where it is on, are of the dtype."""
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    device = next(iter(tensors.values())).device.type
    if torch.is_autocast_enabled(device):
        found["autocast"] = torch.get_autocast_dtype(device)
    for name, other in found.items():
        if other is not dtype:
            raise InvalidInputError(
                f"{name} dtype", other, f"must be {dtype}, that of the engine: see exact_forward"
            )


def _packed_product(linear: Linear, x_MI: torch.Tensor) -> torch.Tensor:
    rows = len(x_MI)
    if rows < linear.min_rows:
        padding_MI = x_MI.new_zeros(linear.min_rows - rows, x_MI.shape[1])
        return linear(torch.cat((x_MI, padding_MI)))[:rows]
    parts = x_MI.tensor_split(max(1, -(-rows // _MAX_ROWS)))
    return torch.cat([linear(part_MI.contiguous()) for part_MI in parts])


def _pack(linears: Sequence[Linear]) -> None:
    """On a CPU, move weights into the layout of products; their values come later."""
    for linear in linears:
        if linear.device.type == "cpu":
            zeros_OI = torch.zeros(linear.out_features, linear.in_features, dtype=linear.dtype)
            linear.weight_rows(0, linear.out_features).write(zeros_OI)
            linear.pack()
