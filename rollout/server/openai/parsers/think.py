"""Reasoning between `<think>` and `</think>`, before what is for the user."""

from __future__ import annotations

from rollout.server.openai.parsers.pieces import HeldSpaces, PieceParser, Reasoning, Text
from rollout.server.openai.parsers.text_reader import Reading

BEGIN, END = "<think>", "</think>"


class ThinkParser(PieceParser):
    """Reasoning is at the beginning alone. Without its end, all is reasoning."""

    markers = (BEGIN, END)

    def __init__(self, begins_inside: bool) -> None:
        """``begins_inside``: the prompt has begun the reasoning already."""
        self._begins_inside = begins_inside
        super().__init__()

    def read(self) -> Reading[None]:
        begun = yield from self.reader.take_one_of(BEGIN)  # some write it once more
        if begun or self._begins_inside:
            yield from self._reasoning()
        else:
            self._text(self.reader.taken())
        yield from self.emit_before(self._text)

    def _reasoning(self) -> Reading[None]:
        yield from self.reader.skip_spaces()
        spaces = HeldSpaces()
        end = yield from self.emit_before(lambda text: self._reason(spaces.push(text)), END)
        rest = spaces.drop()
        if end is None:
            self._reason(rest)
        else:
            yield from self.reader.skip_spaces()

    def _reason(self, text: str) -> None:
        if text:
            self.emit(Reasoning(text))

    def _text(self, text: str) -> None:
        if text:
            self.emit(Text(text))
