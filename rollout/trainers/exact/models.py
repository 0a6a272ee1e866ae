"""Models of a process that stay exact for as long as it lives."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from rollout.trainers.exact.forward import exact_forward


class ExactModels:
    """For frameworks whose workers own the loop: each model becomes exact before its first
    forward, when it has been wrapped and moved."""

    def __init__(self) -> None:
        self._owners: WeakSet[Any] = WeakSet()
        self._contexts = ExitStack()

    def enter(self, owner: Any, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Make the model exact, once for its owner. Raises what `exact_forward` does."""
        if owner not in self._owners:
            self._contexts.enter_context(exact_forward(model, dtype))
            self._owners.add(owner)
