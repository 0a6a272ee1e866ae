"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them."""

from __future__ import annotations

from rollout.server.openai.parsers.text_reader import Reading
from rollout.server.openai.parsers.tool_calls import ToolCallParser, json_call, parsed_json

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.

    Some models leave out the end.
    """

    openers = (BEGIN,)
    markers = (BEGIN, END)

    def read_calls(self, opener: str) -> Reading[None]:
        text = yield from self.reader.take_json()
        self.emit_call(json_call(parsed_json(text)))
        yield from self.reader.take_one_of(END)
