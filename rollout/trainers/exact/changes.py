"""Notices that a trainer has changed parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_SAMPLES = 16  # values of a tensor that are compared


class OptimizerSteps:
    """Counts the steps of all optimizers of this process."""

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


class ChangeDetector:
    """Tells whether parameters may have changed: after an optimizer's step, a write in place that
    torch counts, at another address, or with other values at sixteen places.

    A write through ``.data`` that no optimizer makes and that leaves those values is not seen.
    """

    def __init__(self, steps: OptimizerSteps) -> None:
        self._steps = steps
        self._seen: tuple[float, ...] = ()

    def has_changed(self, *tensors: torch.Tensor | None) -> bool:
        """Since it was asked last; True the first time."""
        seen: list[float] = [self._steps.number]
        for tensor in tensors:
            if tensor is not None:
                flat = tensor.detach().flatten()
                seen += [tensor.data_ptr(), tensor._version]
                seen += flat[:: max(1, flat.numel() // _SAMPLES)].tolist()
        is_same = tuple(seen) == self._seen
        self._seen = tuple(seen)
        return not is_same
