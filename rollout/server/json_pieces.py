"""JSON read in pieces, so that other threads run in between.

A parser in C holds the interpreter's lock until it is done, on whatever thread it runs: 46 MiB of
token ids keep every other one waiting for the better part of a second.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from json import JSONDecodeError
from typing import Any

_PIECE = 2**16  # characters
_MAX_CONTAINERS = 2**18  # lists and objects
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]*")
_BLANKS = re.compile(r"[ \t\n\r]*")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of an object by name.

    Raises ValueError for a name that comes twice: a parser would take the last one, and its sender
    may mean the first.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _comes_twice(counts.most_common(1)[0][0])
    return members


def _comes_twice(name: str) -> ValueError:
    return ValueError(f"{name[:100]!r} comes twice")


_PARSER = json.JSONDecoder()


class Integers(list[int]):
    """An array of integers alone; whoever reads it need not look at each again."""


def loads_in_pieces(data: bytes) -> Any:
    """The value that ``json.loads`` gives, where arrays of integers may be `Integers`.

    Raises what ``json.loads`` does, and ValueError for a name that comes twice in an object and for
    too many lists and objects: each takes longer to make, and more memory, than the bytes that say
    it.

    Whatever is long in a body is an array of numbers or a text. The numbers of an array go through
    the C parser in pieces of 64 Ki characters, a text as one; the rest is walked in Python.
    """
    if len(data) <= _PIECE:
        return json.loads(data, object_pairs_hook=_members)
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    value, end = _value(text, _after_blanks(text, 0), iter(range(_MAX_CONTAINERS)))
    if _after_blanks(text, end) != len(text):
        raise JSONDecodeError("Extra data", text, end)
    return value


def _value(text: str, place: int, left: Iterator[int]) -> tuple[Any, int]:
    """The value that begins at ``place``, and the offset after it.

    ``left``: one for each list or object that may still come.
    """
    begin = text[place : place + 1]
    if begin not in ("[", "{"):
        return _PARSER.raw_decode(text, place)
    if next(left, None) is None:
        raise ValueError(f"it holds more than {_MAX_CONTAINERS} lists and objects")
    inside = _after_blanks(text, place + 1)
    return _array(text, inside, left) if begin == "[" else _object(text, inside, left)


def _array(text: str, place: int, left: Iterator[int]) -> tuple[list[Any], int]:
    if text[place : place + 1] == "]":
        return [], place + 1
    values: list[Any] = Integers()
    holds_others = False
    while True:
        numbers_end = _end_of_numbers(text, place)
        if numbers_end > place:
            numbers = json.loads(f"[{text[place:numbers_end]}]")
            holds_others = holds_others or set(map(type, numbers)) != {int}
            values += numbers
            place = numbers_end
        else:
            holds_others = True
            value, place = _value(text, place, left)
            values.append(value)
        place, is_end = _after_member(text, place, "]")
        if is_end:
            return list(values) if holds_others else values, place


def _object(text: str, place: int, left: Iterator[int]) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    if text[place : place + 1] == "}":
        return members, place + 1
    while True:
        if text[place : place + 1] != '"':
            raise JSONDecodeError("Expecting property name in double quotes", text, place)
        name, place = _PARSER.raw_decode(text, place)
        place = _after_blanks(text, place)
        if text[place : place + 1] != ":":
            raise JSONDecodeError("Expecting ':' delimiter", text, place)
        if name in members:
            raise _comes_twice(name)
        members[name], place = _value(text, _after_blanks(text, place + 1), left)
        place, is_end = _after_member(text, place, "}")
        if is_end:
            return members, place


def _after_member(text: str, place: int, last: str) -> tuple[int, bool]:
    """The place after a comma, or after ``last``; and which of the two."""
    place = _after_blanks(text, place)
    delimiter = text[place : place + 1]
    if delimiter == last:
        return place + 1, True
    if delimiter != ",":
        raise JSONDecodeError("Expecting ',' delimiter", text, place)
    return _after_blanks(text, place + 1), False


def _end_of_numbers(text: str, start: int) -> int:
    """Where the numbers end that come next, at a comma or at the array's end; <= start: none do."""
    found = _NUMBERS.match(text, start, start + _PIECE)
    assert found is not None  # it matches nothing, too
    end = found.end()
    return end if text[end : end + 1] == "]" else text.rfind(",", start, end)


def _after_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    assert found is not None
    return found.end()
