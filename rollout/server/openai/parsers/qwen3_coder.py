"""Calls in XML as Qwen3-Coder writes them, and Qwen 3.5 after it."""

from __future__ import annotations

import re
from typing import Any

from rollout.server.openai.parsers.schema_values import schema_value
from rollout.server.openai.parsers.text_reader import Reading
from rollout.server.openai.parsers.tool_calls import NAME, ToolCallParser, tool_call

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_PARAMETER_NAME = re.compile(r"[^<>\n]*+")


class Qwen3CoderParser(ToolCallParser):
    """`<tool_call><function=name><parameter=name>value</parameter>...</function></tool_call>`.

    Values have lines of their own. Some models leave out `<tool_call>`.
    """

    openers = (BEGIN, FUNCTION)
    markers = (BEGIN, END)

    def read_calls(self, opener: str) -> Reading[None]:
        reader = self.reader
        if opener == BEGIN:
            yield from reader.expect(FUNCTION)
        name = yield from reader.take_while(NAME)
        yield from reader.expect(">")
        arguments: dict[str, Any] = {}
        while (yield from reader.expect(PARAMETER, FUNCTION_END)) == PARAMETER:
            parameter = yield from reader.take_while(_PARAMETER_NAME)
            yield from reader.expect(">")
            value, _ = yield from reader.take_until(PARAMETER_END)
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[parameter] = schema_value(value, self.tools.get(name), parameter)
        self.emit_call(tool_call(name, arguments))
        yield from reader.take_one_of(END)
