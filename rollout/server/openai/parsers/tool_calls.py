"""The base of parsers of tool calls: text up to a call, the call, text after it."""

from __future__ import annotations

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rollout.server.openai.parsers.pieces import HeldSpaces, PieceParser, Text, ToolCall
from rollout.server.openai.parsers.text_reader import Reading, UnreadableError

NAME = re.compile(r"[\w.:/\-]*+")  # of a function: what OpenAI allows, and some more


class ToolCallParser(PieceParser):
    """Finds calls between texts. Spaces after a call are no text, nor are those before the last.

    Text that begins like a call, and is none or never ends, stays text. It is not read again, so
    that any text takes linear time.
    """

    openers: ClassVar[tuple[str, ...]]
    """Markers that a call, or several, may follow."""

    needs_no_opener: ClassVar[bool] = False
    """Calls may be at the beginning of the text without one."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        """``tools``: the functions there are, by name, with the JSON schemas of their
        parameters."""
        self.tools = tools
        self._spaces = HeldSpaces()
        self._is_after_call = False
        super().__init__()

    @abstractmethod
    def read_calls(self, opener: str) -> Reading[None]:
        """Reads the text after the opener, which may be empty, and emits its calls by `emit_call`.

        Raises UnreadableError where it is no call: what was read since the last one is text.
        """

    def read(self) -> Reading[None]:
        opener = "" if self.needs_no_opener else None
        while True:
            if opener is not None:
                try:
                    yield from self.read_calls(opener)
                except UnreadableError:
                    self._emit_text(self.reader.taken())
            opener = yield from self.emit_before(self._emit_text, *self.openers)
            if opener is None:
                break
            self.reader.forget(but=opener)
        if not self._is_after_call:
            self._emit_text_piece(self._spaces.drop())

    def emit_call(self, call: ToolCall) -> None:
        """Add a call with which the text read so far ends."""
        self._is_after_call = True
        self.emit(call)

    def _emit_text(self, text: str) -> None:
        if self._is_after_call:
            text = text.lstrip()
        if text:
            self._is_after_call = False
            self._emit_text_piece(self._spaces.push(text))

    def _emit_text_piece(self, text: str) -> None:
        if text:
            self.emit(Text(text))

    @staticmethod
    def new_call_id() -> str:
        """An identifier for a call, which the tool's answer names."""
        return f"call_{secrets.token_hex(12)}"


def parsed_json(text: str) -> Any:
    """Raises UnreadableError for what is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise UnreadableError from None


def json_call(value: Any) -> ToolCall:
    """The call that is an object with `name` and `arguments`, or `parameters`.

    Raises UnreadableError.
    """
    if not isinstance(value, dict):
        raise UnreadableError
    return tool_call(value.get("name"), value.get("arguments", value.get("parameters")))


def tool_call(name: object, arguments: object) -> ToolCall:
    """Some models write arguments as a text in JSON, or leave out an empty object.

    Raises UnreadableError.
    """
    if not isinstance(name, str) or not name:
        raise UnreadableError
    if isinstance(arguments, str):
        arguments = parsed_json(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UnreadableError
    try:
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
    except RecursionError:
        raise UnreadableError from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
