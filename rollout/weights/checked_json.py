"""Values out of JSON that another process wrote: taken as they should be, or refused by field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollout.errors import InvalidInputError


def checked_object(value: object, keys: Collection[str], field: str) -> Mapping[str, Any]:
    """An object with these keys and no others."""
    if not isinstance(value, Mapping) or set(value) != set(keys):
        raise InvalidInputError(field, value, f"must be an object of {', '.join(keys)}")
    return value


def checked_list(value: object, field: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise InvalidInputError(field, value, "must be a list")
    return list(value)


def checked_int(value: object, field: str, *, least: int = 0, most: int = 2**62) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidInputError(field, value, f"must be an integer from {least} to {most}")
    return value


def checked_name(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInputError(field, value, "must be a name")
    return value


def checked_hex(value: object, field: str) -> bytes:
    """Bytes written as lower-case hexadecimal digits."""
    try:
        return bytes.fromhex(checked_name(value, field))
    except ValueError:
        raise InvalidInputError(field, value, "must be bytes in hexadecimal") from None
