"""How many tensors one call may name.

Each name is looked at on the engine's thread, or with the interpreter's lock held: nothing is
generated meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

MAX_TENSORS = 2**16

T = TypeVar("T")


def too_many(count: int) -> str:
    """Why so many are refused; empty: they are not."""
    if count <= MAX_TENSORS:
        return ""
    return f"one call names at most {MAX_TENSORS} tensors, not {count}: make it several calls"


def _checked(value: Any) -> Any:
    if isinstance(value, Sequence | Mapping):
        _refuse(len(value))
    return value


def _checked_handles(value: Any) -> Any:
    """By the entries of their layouts, as far as those are what they should be."""
    if isinstance(value, list):
        layouts = [each.get("layout") for each in value if isinstance(each, dict)]
        entries = [each.get("entries") for each in layouts if isinstance(each, dict)]
        _refuse(sum(len(each) for each in entries if isinstance(each, list)))
    return value


def _refuse(count: int) -> None:
    if reason := too_many(count):
        raise PydanticCustomError("too_many_tensors", "{reason}", {"reason": reason})


PerTensor = Annotated[T, BeforeValidator(_checked)]
"""A list or a mapping with a member for each tensor."""

Handles = Annotated[list[dict[str, Any]], BeforeValidator(_checked_handles)]
