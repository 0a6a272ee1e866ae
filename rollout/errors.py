"""One small tree of errors. Each message names the field, the value and what would be right."""

from __future__ import annotations


class RolloutError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInputError(RolloutError, ValueError):
    """A value handed to a public call is wrong. The call did nothing."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}={shown}: {remedy}")

    def __reduce__(self) -> tuple[type[InvalidInputError], tuple[str, object, str]]:
        """So that it crosses processes: exceptions are made again from their message alone."""
        return type(self), (self.field, self.value, self.remedy)


class UnsupportedModelError(RolloutError):
    """The checkpoint asks for something no model file here implements."""


class CheckpointError(RolloutError):
    """A model folder is incomplete, truncated or does not match its own config."""


class OutOfMemoryError(RolloutError):
    """A request, or the model itself, cannot fit the memory budget even alone."""


class WeightUpdateError(RolloutError):
    """A weight update was refused, or one left half-way keeps the engine from serving."""


class EngineStateError(RolloutError):
    """The engine is paused, its memory released or its loop at an end: the call did nothing; the
    message says what to call first."""


class ExactnessError(RolloutError):
    """Exact mode was asked for and this processor's libraries cannot give it."""


class IntegrityError(RolloutError):
    """A pool's own books do not balance: a bug of ours, found by check_integrity()."""


class ClusterError(RolloutError):
    """The cluster cannot go on: its replicas die again and again, or none could be started."""
