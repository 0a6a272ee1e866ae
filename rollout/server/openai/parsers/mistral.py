"""Calls as Mistral's models write them."""

from __future__ import annotations

import re
import secrets
import string

from rollout.server.openai.parsers.text_reader import Reading, UnreadableError
from rollout.server.openai.parsers.tool_calls import (
    NAME,
    ToolCallParser,
    json_call,
    parsed_json,
    tool_call,
)

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_ID = re.compile(r"\w*+")
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LEN = 9  # their templates refuse others


class MistralParser(ToolCallParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; since 2025
    `[TOOL_CALLS]name[ARGS]{...}` for each call, with `[CALL_ID]...` between or without `[ARGS]`."""

    openers = (BEGIN,)
    markers = (BEGIN, CALL_ID, ARGUMENTS)

    def read_calls(self, opener: str) -> Reading[None]:
        yield from self.reader.skip_spaces()
        name = yield from self.reader.take_while(NAME)
        if name:
            marker = yield from self.reader.take_one_of(CALL_ID, ARGUMENTS)
            if marker == CALL_ID:
                yield from self.reader.take_while(_ID)
                yield from self.reader.expect(ARGUMENTS)
            text = yield from self.reader.take_json()
            self.emit_call(tool_call(name, parsed_json(text)))
            return
        text = yield from self.reader.take_json("[")
        calls = [json_call(value) for value in parsed_json(text)]
        if not calls:
            raise UnreadableError
        for call in calls:
            self.emit_call(call)

    @staticmethod
    def new_call_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LEN))
