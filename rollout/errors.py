"""One small tree of errors. Each message names the field, the value and what would be right."""

from __future__ import annotations

_LONGEST_SHOWN = 120  # characters of a value in a message


class RolloutError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInputError(RolloutError, ValueError):
    """A value passed to a public call is wrong. The call changed nothing."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field}={_shown(value)}: {remedy}")

    def __reduce__(self) -> tuple[type[InvalidInputError], tuple[str, object, str]]:
        """Pickle by the three arguments: by default an exception is rebuilt from its message."""
        return type(self), (self.field, self.value, self.remedy)


class UnknownOptionError(InvalidInputError):
    """An engine has no option of that name."""


class PromptTooLongError(InvalidInputError):
    """A prompt has more tokens than the context, or a configured limit, leaves for it.

    Clients of agents tell it from other refusals by its words, and end the conversation.
    """

    @classmethod
    def of_length(cls, length: int | str, max_tokens: int) -> PromptTooLongError:
        """The error for a prompt of ``length`` tokens where ``max_tokens`` are allowed."""
        return cls(
            "len(prompt)",
            length,
            "is longer than the model's context length or server.max_prompt_len allows: at most "
            f"{max_tokens} tokens",
        )


def _shown(value: object) -> str:
    """A short text for any value, however long or deep. Never raises."""
    if isinstance(value, (str, bytes, list, tuple)):
        value = value[:_LONGEST_SHOWN]  # so that repr() does not write out a long one
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
    """A weight update was refused, or an incomplete one keeps the engine from serving."""


class EngineStateError(RolloutError):
    """The engine is paused, its memory is released or its loop has ended. The call changed nothing;
    the message says what to call first."""


class ExactnessError(RolloutError):
    """Exact mode was requested, and this processor's libraries are not row-invariant."""


class IntegrityError(RolloutError):
    """A pool's accounts do not add up: a bug in this package, found by check_integrity()."""


class ParallelError(RolloutError):
    """Ranks that run one model have lost each other, or differ in what they compute."""


class ClusterError(RolloutError):
    """The cluster cannot continue: its replicas die repeatedly, or none could be started."""


class OutputError(RolloutError):
    """A job's output cannot be written, or holds what this job did not write."""


class MetricsError(RolloutError):
    """A job's counters cannot be written."""
