"""One small tree of errors. Each message names the field, the value and what would be right."""

from __future__ import annotations

_LONGEST_SHOWN = 120  # characters of a value in a message


class RolloutError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInputError(RolloutError, ValueError):
    """A value handed to a public call is wrong. The call did nothing."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={_shown(value)}: {remedy}")

    def __reduce__(self) -> tuple[type[InvalidInputError], tuple[str, object, str]]:
        """So that it crosses processes: exceptions are made again from their message alone."""
        return type(self), (self.field, self.value, self.remedy)


def _shown(value: object) -> str:
    """Short, and never an error of its own, however long or deep the value is."""
    if isinstance(value, (str, bytes, list, tuple)):
        value = value[:_LONGEST_SHOWN]  # of a long one not all is written to be thrown away
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list in lists
        return f"({type(value).__name__})"
    return shown if len(shown) <= _LONGEST_SHOWN else shown[: _LONGEST_SHOWN - 3] + "..."


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


class ParallelError(RolloutError):
    """Ranks that run one model have lost each other, or differ in what they compute."""


class ClusterError(RolloutError):
    """The cluster cannot go on: its replicas die again and again, or none could be started."""
