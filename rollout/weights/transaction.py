"""A weight update reaches the model whole, or the model refuses to serve.

States::

    WHOLE --begin--> LOADING --commit--> WHOLE (version bumped)
                        |
                        +-- failure after a write --> TORN --full update--> LOADING ...

What is known beforehand is checked before a byte moves. From TORN only an update that names every
tensor of the model leads back to WHOLE.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping

import torch

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.layers.destination import Destination, mismatches
from rollout.models.causal_lm import CausalLM


class WeightState(enum.Enum):
    WHOLE = "whole"
    LOADING = "loading"
    TORN = "torn"


class WeightTransaction:
    """Owns the weight version of one model and whether it may serve."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.version = 0
        self.state = WeightState.WHOLE
        self._reason = ""

    def require_whole(self) -> None:
        """Raises WeightUpdateError unless the weights are those of one version."""
        if self.state is not WeightState.WHOLE:
            raise WeightUpdateError(
                f"weights are {self.state.value}: {self._reason}; "
                "send an update that names every tensor of the model"
            )

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """One whole transaction.

        A collection is checked through before anything is written; of a generator each tensor is
        checked as it comes, and a bad one leaves the model torn. Raises
        InvalidInputError for names, shapes and dtypes the model does not have, WeightUpdateError
        for a partial update of a torn model.
        """
        destinations = self._model.destinations()
        must_be_full = self.state is not WeightState.WHOLE
        if isinstance(named_tensors, Collection):
            offered = {name: tensor.shape for name, tensor in named_tensors}
            _refuse(mismatches(destinations, offered, partial=not must_be_full))
            for name, tensor in named_tensors:
                _refuse_dtype(name, tensor)
            _refuse_untied(destinations, dict(named_tensors))
        loaded: dict[str, torch.Size] = {}
        try:
            for name, tensor in named_tensors:
                _refuse(mismatches(destinations, {name: tensor.shape}, partial=True))
                _refuse_dtype(name, tensor)
                self.state, self._reason = WeightState.LOADING, "an update is under way"
                destinations[name].write(tensor)
                loaded[name] = tensor.shape
            if must_be_full:
                _refuse(mismatches(destinations, loaded))
            self._model.finish_loading()
        except BaseException as error:
            if self.state is WeightState.LOADING:
                self._tear(list(loaded), error)
            raise
        self.state = WeightState.WHOLE
        self.version = version

    def _tear(self, loaded: list[str], error: BaseException) -> None:
        self.state = WeightState.TORN
        shown = ", ".join(loaded[:8]) + (", ..." if len(loaded) > 8 else "")
        self._reason = f"an update failed after loading {len(loaded)} tensors ({shown}): {error}"


def _refuse(lines: list[str]) -> None:
    if lines:
        shown = "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")
        raise InvalidInputError("named_tensors", shown, "must match the model's own tensors")


def _refuse_untied(
    destinations: Mapping[str, Destination], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Two names of one tensor must carry one value."""
    for name, tensor in tensors.items():
        other = tensors.get(destinations[name].alias_of or name)
        if other is not None and other is not tensor and not torch.equal(other, tensor):
            raise InvalidInputError(
                "named_tensors", name, f"differs from {destinations[name].alias_of}, its tied twin"
            )


def _refuse_dtype(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise InvalidInputError(
            f"named_tensors[{name!r}].dtype", tensor.dtype, "must be a floating-point dtype"
        )
