"""Checks of values from callers and other processes: returned as the right type, or refused.

Each function raises InvalidInputError naming ``field``.
"""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from rollout.errors import InvalidInputError

_MAX = 2**62

E = TypeVar("E", bound=enum.StrEnum)


def did_you_mean(
    name: object, known: Iterable[str], shown: Mapping[str, str] = MappingProxyType({})
) -> str:
    """``, did you mean X?`` for the name in ``known`` that is most like ``name``; else nothing.

    ``shown``: what is said for a name, where that is not the name itself.
    """
    meant = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f", did you mean {shown.get(meant[0], meant[0])}?" if meant else ""


def checked_object(value: object, keys: Collection[str], field: str) -> Mapping[str, Any]:
    """An object with these keys and no others."""
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise InvalidInputError(field, value, f"must be an object of {', '.join(keys)}")
    return value


def checked_list(value: object, field: str) -> list[Any]:
    """A copy of a list or tuple."""
    if not isinstance(value, (list, tuple)):
        raise InvalidInputError(field, value, "must be a list")
    return list(value)


def checked_iterable(value: object, field: str, noun: str) -> Iterable[Any]:
    """Any iterable except text, bytes and mappings. ``noun`` names its items in the error."""
    # A tensor of no dimension has an __iter__ that raises.
    if isinstance(value, (str, bytes, Mapping)) or getattr(value, "ndim", 1) == 0:
        raise InvalidInputError(field, value, f"must be a list of {noun}")
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        raise InvalidInputError(field, value, f"must be a list of {noun}") from None
    return value  # type: ignore[return-value]


def checked_int(value: object, field: str, *, minimum: int = 0, maximum: int = _MAX) -> int:
    """An integer in [minimum, maximum], numpy's converted to Python's. Booleans are refused."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not minimum <= value <= maximum:  # type: ignore[operator]
        bound = f">= {minimum}" if maximum == _MAX else f"from {minimum} to {maximum}"
        raise InvalidInputError(field, value, f"must be an integer {bound}")
    return int(value)  # type: ignore[call-overload]


def checked_number(value: object, field: str, *, maximum: float) -> float:
    """A number in [0, maximum]. Booleans are refused."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= maximum:  # type: ignore[operator]
        raise InvalidInputError(field, value, f"must be a number from 0 to {maximum:g}")
    return float(value)  # type: ignore[arg-type]


def checked_seconds(value: object, field: str, *, minimum: float = 1e-9) -> float:
    """A number of seconds in [minimum, 1e6)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not minimum <= value < 1e6:  # type: ignore[operator]
        bound = ">= 0" if minimum == 0 else "> 0"
        raise InvalidInputError(field, value, f"must be a number of seconds {bound}, below 1e6")
    return float(value)  # type: ignore[arg-type]


def checked_flag(value: object, field: str) -> bool:
    """A boolean, numpy's converted to Python's."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidInputError(field, value, "must be True or False")
    return bool(value)


def checked_member(value: object, field: str, kind: type[E]) -> E:
    """A member of the enumeration ``kind``, from itself or from its value."""
    if isinstance(value, str) and value in list(kind):
        return kind(value)
    raise InvalidInputError(
        field, value, f"must be one of {', '.join(kind)}{did_you_mean(value, kind)}"
    )


def checked_path(value: object, field: str) -> str:
    """A path as text, whether the file exists or not."""
    remedy = "must be a path: text or os.PathLike, not empty, without null characters"
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
        ok = isinstance(path, str) and bool(path) and b"\0" not in os.fsencode(path)
    except (TypeError, UnicodeEncodeError):
        ok = False
    if not ok:
        raise InvalidInputError(field, value, remedy)
    return path


def checked_name(value: object, field: str) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidInputError(field, value, "must be a name")
    return value


def checked_hex(value: object, field: str) -> bytes:
    """The bytes that hexadecimal digits stand for."""
    try:
        return bytes.fromhex(checked_name(value, field))
    except ValueError:
        raise InvalidInputError(field, value, "must be bytes in hexadecimal") from None
