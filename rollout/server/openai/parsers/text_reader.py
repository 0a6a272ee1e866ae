"""Text that comes in pieces, read by generators that stop where they need more of it."""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")

Reading = Generator[None, None, T]
"""Reads until it knows its result; each `yield` waits for the next piece."""

_SPACES = re.compile(r"\s*+")
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_BETWEEN_STRINGS = re.compile(r"[\s\d:,+\-.eEtrufalsn]*+")  # what JSON has there, beside brackets


class UnreadableError(Exception):
    """The text does not continue as it began, or has ended too early."""


class TextReader:
    """Reads a text as it comes, piece by piece, in time linear in the text.

    `taken` has the text read since the last `forget`, in case it proves unreadable.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # before it everything is read
        self._taken: list[str] = []
        self._ended = False

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    @property
    def unread_len(self) -> int:
        """Characters that wait for the next piece."""
        return len(self._text) - self._at

    @property
    def at_end(self) -> bool:
        return self._ended and not self.unread_len

    def taken(self) -> str:
        """The text read since the last `forget`; forgets it."""
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def forget(self, but: str = "") -> None:
        """Drop the text read so far: it is parsed. ``but``: its end, which is not."""
        self._taken = [but]

    def take_before(self, *markers: str) -> tuple[str, str | None]:
        """The text before the first of the markers, and the marker, which is read too.

        None where none has come yet: then the text is as much as surely belongs to no marker.
        """
        if not markers:
            return self._take(len(self._text)), None
        found = _any_of(markers).search(self._text, self._at)
        if found is not None:
            text = self._take(found.start())
            return text, self._take(found.end())
        begun = 0 if self._ended else _begun_len(self._text[self._at :], markers)
        return self._take(len(self._text) - begun), None

    def take_until(self, *markers: str) -> Reading[tuple[str, str]]:
        """The text before the first of the markers, and the marker, which is read too."""
        parts: list[str] = []
        while True:
            text, marker = self.take_before(*markers)
            parts.append(text)
            if marker is not None:
                return "".join(parts), marker
            yield from self._more()

    def take_while(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest text that the pattern matches, which is to match the beginnings of it."""
        parts: list[str] = []
        while True:
            parts.append(self._take(_end_of(pattern, self._text, self._at)))
            if self.unread_len or self._ended:
                return "".join(parts)
            yield

    def skip_spaces(self) -> Reading[None]:
        yield from self.take_while(_SPACES)

    def take_one_of(self, *options: str) -> Reading[str | None]:
        """Reads the option that comes next, after spaces. None: no option comes; the spaces are
        read."""
        yield from self.skip_spaces()
        longest = max(map(len, options))
        while True:
            rest = self._text[self._at : self._at + longest]
            for option in options:
                if rest.startswith(option):
                    return self._take(self._at + len(option))
            if self._ended or not any(option.startswith(rest) for option in options):
                return None
            yield

    def expect(self, *options: str) -> Reading[str]:
        """`take_one_of` that raises UnreadableError if no option comes."""
        option = yield from self.take_one_of(*options)
        if option is None:
            raise UnreadableError
        return option

    def take_json(self, opening: str = "{") -> Reading[str]:
        """Reads the JSON that comes next, from ``opening`` to the bracket that closes it.

        Raises UnreadableError at the first character that JSON does not have there.
        """
        parts = [(yield from self.expect(opening))]
        depth, in_string = 1, False
        while depth:
            pattern = _IN_STRING if in_string else _BETWEEN_STRINGS
            parts.append(self._take(_end_of(pattern, self._text, self._at)))
            mark = self._text[self._at : self._at + 1]
            if mark in ("", "\\"):  # a backslash comes with what it escapes
                yield from self._more()
                continue
            if mark == '"':
                in_string = not in_string
            elif mark in "{[":
                depth += 1
            elif mark in "}]":
                depth -= 1
            else:
                raise UnreadableError
            parts.append(self._take(self._at + 1))
        return "".join(parts)

    def _more(self) -> Reading[None]:
        if self._ended:
            raise UnreadableError
        yield

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if text:
            self._taken.append(text)
        return text


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    assert found is not None  # these patterns match nothing, too
    return found.end()


@lru_cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _begun_len(text: str, markers: tuple[str, ...]) -> int:
    longest = min(len(text), max(map(len, markers)) - 1)
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
