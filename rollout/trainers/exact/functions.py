"""Autograd of the engine's ops: forward is the op, backward that of a plain torch function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Compute = Callable[..., torch.Tensor]
"""A function of tensors alone."""


def exactly(op: Compute, plain: Compute, *tensors: torch.Tensor) -> torch.Tensor:
    """``op(*tensors)``, differentiated as ``plain(*tensors)``, which the backward computes anew.

    Only the tensors are kept for it. ``plain`` must be the same function, but for rounding.
    """
    return _Recomputed.apply(op, plain, *tensors)


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, op: Compute, plain: Compute, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*tensors)
        return op(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                tensor.detach().requires_grad_(needed)
                for tensor, needed in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            output = ctx.plain(*inputs)
        found = iter(
            torch.autograd.grad(
                output, [tensor for tensor in inputs if tensor.requires_grad], grad.to(output.dtype)
            )
        )
        return None, None, *(next(found) if needed else None for needed in wanted)


def product(
    multiply: Compute, x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """``multiply(x)``, which is ``x @ weight_OI.T + bias_O``: [..., I] to [..., O]."""
    return _Product.apply(multiply, x, weight_OI, bias_O)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        multiply: Compute,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OI)
        return multiply(x.flatten(0, -2)).view(*x.shape[:-1], len(weight_OI))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_MO = grad.flatten(0, -2)
        return (
            None,
            grad @ weight_OI if wants_x else None,
            grad_MO.t() @ x.flatten(0, -2) if wants_weight else None,
            grad_MO.sum(0) if wants_bias else None,
        )
