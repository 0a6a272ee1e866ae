"""Splits a model's output into the parts of a message: reasoning, content, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.server.openai.parsers.pieces import Piece, Reasoning, Text, ToolCall
from rollout.server.openai.parsers.think import ThinkParser
from rollout.server.openai.parsers.tool_calls import ToolCallParser


@dataclass(slots=True)
class MessagePart:
    """A part of a message; the whole one is its parts, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class MessageReader:
    def __init__(
        self,
        think: ThinkParser | None,
        tools: ToolCallParser | None,
        *,
        streams_reasoning: bool = True,
        parallel_calls: bool = True,
    ) -> None:
        """
        Args:
            think: None: reasoning is text.
            tools: None: calls are text.
            streams_reasoning: reasoning comes as it is written, else when it has ended.
            parallel_calls: the message may have several calls, else the first alone.
        """
        self._think, self._tools = think, tools
        self._streams_reasoning, self._parallel_calls = streams_reasoning, parallel_calls
        self._held_reasoning: list[str] = []
        self.num_calls = 0

    def push(self, text: str) -> MessagePart:
        """Add text to the output; returns the part of the message that is certain with it."""
        if self._think is None:
            return self._part(self._find_calls([Text(text)]))
        return self._part(self._find_calls(self._think.push(text)))

    def finish(self, text: str = "") -> MessagePart:
        pieces: list[Piece] = [Text(text)]
        if self._think is not None:
            pieces = self._think.push(text) + self._think.finish()
        pieces = self._find_calls(pieces)
        if self._tools is not None:
            pieces += self._tools.finish()
        return self._part(pieces, ended=True)

    def _find_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found += self._tools.push(piece.text) if isinstance(piece, Text) else [piece]
        return found

    def _part(self, pieces: list[Piece], ended: bool = False) -> MessagePart:
        part = MessagePart(content="".join(each.text for each in pieces if isinstance(each, Text)))
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self._held_reasoning.append(piece.text)
            elif isinstance(piece, ToolCall) and (self._parallel_calls or not self.num_calls):
                part.calls.append(piece)
                self.num_calls += 1
        if self._streams_reasoning or ended or part.content or part.calls:
            part.reasoning = "".join(self._held_reasoning)
            self._held_reasoning.clear()
        return part
