"""The products of a trainer's modules in the engine's order.

Legend: M rows, I input features, O output features, N experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rollout.errors import InvalidInputError
from rollout.models.layers.grouped_linear import GroupedLinear
from rollout.models.layers.linear import Linear
from rollout.models.layers.row_invariance import make_row_invariant
from rollout.models.layers.weight_factory import WeightFactory
from rollout.trainers.exact.functions import product

_MAX_ROWS = 2048  # of a product on a CPU: so many were compared with fewer


class OptimizerSteps:
    """Counts the steps of all optimizers of this process, whatever they write and however."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A context in which steps count."""

        def note(*_: Any) -> None:
            self.number += 1

        hook = register_optimizer_step_post_hook(note)
        try:
            yield
        finally:
            hook.remove()


class Watch:
    """Whether parameters have changed: after any optimizer's step, a write in place that torch
    counts, or at another address."""

    def __init__(self, steps: OptimizerSteps) -> None:
        self._steps = steps
        self._seen: tuple[int, ...] = ()

    def has_changed(self, *tensors: torch.Tensor | None) -> bool:
        """Since it was asked last; True the first time."""
        there = [each for each in tensors if each is not None]
        seen = (
            self._steps.number,
            *(n for each in there for n in (each.data_ptr(), each._version)),
        )
        is_same = seen == self._seen
        self._seen = seen
        return not is_same


class ExactLinear:
    """The product with a module's ``weight`` and, if it has one, ``bias``. On a CPU the weight is
    packed, and packed again once it has changed."""

    def __init__(self, module: Any, inputs: int, outputs: int, steps: OptimizerSteps) -> None:
        weight, bias = module.weight, getattr(module, "bias", None)
        self._module = module
        self._watch = Watch(steps)
        self._factory = WeightFactory(dtype=weight.dtype, device=weight.device)
        self.linear = self._factory.linear(inputs, outputs, bias=bias is not None)
        _pack([self.linear])

    @staticmethod
    def of(module: nn.Linear, steps: OptimizerSteps) -> ExactLinear:
        """The product of a linear module."""
        return ExactLinear(module, module.in_features, module.out_features, steps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O]."""
        weight_OI, bias_O = self._module.weight, getattr(self._module, "bias", None)
        return self.apply(x, weight_OI, bias_O, (weight_OI, bias_O))

    def apply(
        self,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        sources: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """The product with a weight and a bias that are computed from parameters.

        Raises InvalidInputError for parameters that are elsewhere meanwhile.
        """
        linear = self.linear
        if weight_OI.shape != (linear.out_features, linear.in_features):
            raise InvalidInputError(
                "model", list(weight_OI.shape),
                f"a weight must be {[linear.out_features, linear.in_features]}: it is sharded",
            )  # fmt: skip
        if self._watch.has_changed(*sources):
            outputs = linear.out_features
            if not linear.is_packed:
                linear.borrow(weight_OI.detach(), None if bias_O is None else bias_O.detach())
            else:
                linear.weight_rows(0, outputs).write(weight_OI.detach())
                if bias_O is not None:
                    linear.bias_rows(0, outputs).write(bias_O.detach())
        return product(self._multiply, x, weight_OI, bias_O)

    def _multiply(self, x_MI: torch.Tensor) -> torch.Tensor:
        missing = self.linear.min_rows - len(x_MI)
        if missing > 0:
            padded_MI = torch.cat((x_MI, x_MI.new_zeros(missing, x_MI.shape[1])))
            return self.linear(padded_MI)[: len(x_MI)]
        if x_MI.is_cuda or len(x_MI) <= _MAX_ROWS:
            return self.linear(x_MI.contiguous())
        parts = x_MI.tensor_split(-(-len(x_MI) // _MAX_ROWS))
        return torch.cat([self.linear(part_MI.contiguous()) for part_MI in parts])


class ExactGrouped:
    """The products of rows with their experts' weights, one parameter [N, O, I] of a module."""

    def __init__(
        self, weights_NOI: torch.Tensor, shape: tuple[int, int, int], steps: OptimizerSteps
    ):
        """``shape``: N, O, I; the parameter itself may be elsewhere meanwhile."""
        experts, outputs, inputs = shape
        factory = WeightFactory(dtype=weights_NOI.dtype, device=weights_NOI.device)
        self.grouped = GroupedLinear(experts, inputs, outputs, factory)
        self._watch = Watch(steps)
        _pack(self.grouped.linears())

    def refresh(self, weights_NOI: torch.Tensor) -> None:
        """Take the parameter's values, if they have changed."""
        if self._watch.has_changed(weights_NOI):
            self.grouped.all_weights(()).write(weights_NOI.detach())


def make_exact(linears: Sequence[Linear]) -> None:
    """Make products' rows independent of the number of rows. Raises ExactnessError where this
    machine's cannot be."""
    make_row_invariant(linears, _MAX_ROWS)


def _pack(linears: Sequence[Linear]) -> None:
    """On a CPU, move weights into the layout of products; their values come later."""
    for linear in linears:
        if linear.device.type == "cpu":
            zeros_OI = torch.zeros(linear.out_features, linear.in_features, dtype=linear.dtype)
            linear.weight_rows(0, linear.out_features).write(zeros_OI)
            linear.pack()
