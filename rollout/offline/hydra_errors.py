"""Hydra's own errors, of keys and values that do not fit, as errors of ours."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from rollout.errors import InvalidInputError

_RAISE = "HYDRA_FULL_ERROR"  # 1: Hydra raises; else it prints an error and ends with 1


class HydraErrors:
    """Shows Hydra's errors of one command line, in full with HYDRA_FULL_ERROR=1."""

    def __init__(self, overrides: Sequence[str]) -> None:
        """``overrides``: the command line's arguments, flags among them or not."""
        self._overrides = overrides
        self._wanted = os.environ.get(_RAISE)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Around Hydra. Raises InvalidInputError."""
        os.environ[_RAISE] = "1"
        try:
            yield
        except (HydraException, OmegaConfBaseException) as error:
            if self._wanted == "1":
                raise
            raise self._input_error(error) from error
        finally:
            self._restore()

    @contextmanager
    def job(self) -> Iterator[None]:
        """Around what Hydra runs: its environment, and its children's, is the user's."""
        self._restore()
        try:
            yield
        finally:
            os.environ[_RAISE] = "1"

    def _restore(self) -> None:
        if self._wanted is None:
            os.environ.pop(_RAISE, None)
        else:
            os.environ[_RAISE] = self._wanted

    def _input_error(self, error: Exception) -> InvalidInputError:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
        message = " ".join(str(error).split())
        if isinstance(error, MissingConfigException) and error.options:
            group, _, option = str(error.missing_cfg_file).rpartition("/")
            return InvalidInputError(group, option, f"must be one of {', '.join(error.options)}")
        if isinstance(error, OverrideParseException):
            key, _, text = error.override.partition("=")
            return InvalidInputError(key, text, f"cannot be read: {_first_line(error.message)}")
        field, value = self._override_in(message)
        if isinstance(cause, OmegaConfBaseException):
            field = field or cause.full_key or "arguments"
            remedy = _first_line(cause.msg or str(cause))
            if isinstance(cause, ConfigKeyError | ConfigAttributeError):
                remedy = "there is no such key" + _nearest(cause)
            return InvalidInputError(field, value, remedy)
        return InvalidInputError(field or "arguments", value, message)

    def _override_in(self, message: str) -> tuple[str | None, str | None]:
        """Key and value of the argument that a message is about, where it names one."""
        pairs = [override.partition("=") for override in self._overrides]
        for override, (name, _, value) in zip(self._overrides, pairs, strict=True):
            key = name.lstrip("+~")
            if "=" in override and (override in message or f"'{key}'" in message):
                return key, value
        return None, None


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0]


def _nearest(error: OmegaConfBaseException) -> str:
    """The key that may have been meant, as the end of a sentence."""
    node = error.parent_node
    names = [str(name) for name in node] if isinstance(node, DictConfig) else []
    close = difflib.get_close_matches(str(error.key), names, cutoff=0.6)
    if not names:
        return ""
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(names)}"
