"""Pieces of a message, and the base class of parsers of a model's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rollout.server.openai.parsers.text_reader import Reading, TextReader


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. It comes whole: half of one that is never finished would be no text."""

    name: str
    arguments: str  # a JSON object


Piece = Text | Reasoning | ToolCall


class PieceParser(ABC):
    """Makes pieces of a text as it comes.

    The pieces do not depend on how the text was cut: texts that follow each other only have to be
    joined. All text is in some piece, but for markers and the spaces beside them.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Strings that its formats are made of; some tokenizers have special tokens for them."""

    def __init__(self) -> None:
        self.reader = TextReader()
        self._pieces: list[Piece] = []
        self._reading = self.read()
        next(self._reading)

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain with this text."""
        self.reader.feed(text)
        next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Piece]:
        """The rest, when the text has ended."""
        self.reader.end()
        next(self._reading, None)
        return self._taken()

    @abstractmethod
    def read(self) -> Reading[None]:
        """Reads to the end of the text."""

    def emit(self, piece: Piece) -> None:
        """Add a piece: all text read so far is parsed."""
        self.reader.forget()
        self._pieces.append(piece)

    def emit_before(self, emit: Callable[[str], None], *markers: str) -> Reading[str | None]:
        """Hands out text as it comes, up to the first of the markers. None: it has ended."""
        while True:
            text, marker = self.reader.take_before(*markers)
            emit(text)
            if marker is not None or self.reader.at_end:
                return marker
            yield

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


class HeldSpaces:
    """Text without the spaces at its end, which are held until more text comes."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The text that may be shown, with the spaces that were held before it."""
        shown_len = len(text.rstrip())
        if not shown_len:
            self._held.append(text)
            return ""
        shown = self.drop() + text[:shown_len]
        self._held = [text[shown_len:]]
        return shown

    def drop(self) -> str:
        """The spaces that were held; they are no longer."""
        held = "".join(self._held)
        self._held = []
        return held
