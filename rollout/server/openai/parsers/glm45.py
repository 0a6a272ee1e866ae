"""Calls as GLM 4.5 and its successors write them."""

from __future__ import annotations

from typing import Any

from rollout.server.openai.parsers.schema_values import schema_value
from rollout.server.openai.parsers.text_reader import Reading
from rollout.server.openai.parsers.tool_calls import NAME, ToolCallParser, tool_call

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45Parser(ToolCallParser):
    """`<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each
    argument, then `</tool_call>`; spaces between them are free."""

    openers = (BEGIN,)
    markers = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)

    def read_calls(self, opener: str) -> Reading[None]:
        reader = self.reader
        yield from reader.skip_spaces()
        name = yield from reader.take_while(NAME)
        arguments: dict[str, Any] = {}
        while (yield from reader.expect(KEY, END)) == KEY:
            key, _ = yield from reader.take_until(KEY_END)
            yield from reader.expect(VALUE)
            value, _ = yield from reader.take_until(VALUE_END)
            arguments[key.strip()] = schema_value(value, self.tools.get(name), key.strip())
        self.emit_call(tool_call(name, arguments))
