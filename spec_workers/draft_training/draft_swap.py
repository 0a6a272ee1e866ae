"""New weights of an engine's draft, in one transaction, between two steps."""

from __future__ import annotations

import enum

import torch

from rollout.engine.engine import RolloutEngine
from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError

SELECTOR = "draft"


class SwapResult(enum.StrEnum):
    SWAPPED = "swapped"
    POSTPONED = "postponed"  # another update is open, or the weights are not there: try again later
    REFUSED = "refused"  # the engine does not take them, and says why; the old draft serves


class DraftSwap:
    """Writes a draft's weights into an engine and notices when somebody else has."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._version = self._version_now
        self.unavailable_reason = ""  # the last one that did not end in SWAPPED

    @property
    def is_ours(self) -> bool:
        """Whether the draft in the engine is the one it had, or was given here."""
        return self._version == self._version_now

    def acknowledge(self) -> None:
        """Somebody else's draft was read."""
        self._version = self._version_now

    def swap(self, tensors: list[tuple[str, torch.Tensor]]) -> SwapResult:
        """All of it or nothing: every tensor is here and is checked before a byte is written.

        The target's weights, KV, prefix cache and running requests are left alone.
        """
        weights = self._engine.worker.weights
        try:
            weights.require_resident()
            if weights.is_under_way:
                raise WeightUpdateError("another weight update is under way")
            self._engine.update_weights_from_tensor(tensors, selector=SELECTOR, check_finite=True)
        except (EngineStateError, WeightUpdateError) as error:
            self.unavailable_reason = str(error)
            return SwapResult.POSTPONED
        except InvalidInputError as error:
            self.unavailable_reason = str(error)
            return SwapResult.REFUSED
        self._version, self.unavailable_reason = self._version_now, ""
        return SwapResult.SWAPPED

    def read(self) -> dict[str, torch.Tensor]:
        """The draft's own weights as the engine has them, by name, as copies on the CPU."""
        parts = self._engine.worker.weights.parts
        return {
            name: loader.read().cpu().clone()
            for name, loader in parts.weight_loaders(parts.selected(SELECTOR)).items()
            if not loader.is_borrowed
        }

    @property
    def _version_now(self) -> int:
        parts = self._engine.worker.weights.parts.selected(SELECTOR)
        return sum(self._engine.weight_versions[part] for part in parts)
