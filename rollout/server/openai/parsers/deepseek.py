"""Calls as DeepSeek V3, R1 and V3.1 write them."""

from __future__ import annotations

from rollout.server.openai.parsers.text_reader import Reading
from rollout.server.openai.parsers.tool_calls import NAME, ToolCallParser, parsed_json, tool_call


def _marker(words: str) -> str:
    """A marker between full-width bars, with a low block for each space."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


ALL_BEGIN, ALL_END = _marker("tool calls begin"), _marker("tool calls end")
BEGIN, END = _marker("tool call begin"), _marker("tool call end")
SEPARATOR = _marker("tool sep")
FENCE, FENCE_END = "```json", "```"


class DeepSeekParser(ToolCallParser):
    """Calls between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.

    V3.1's are `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`; V3 and R1 have the
    type in the name's place, the name in a line after the separator, and the arguments in a fenced
    block.
    """

    openers = (ALL_BEGIN, BEGIN)
    markers = (ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR)

    def read_calls(self, opener: str) -> Reading[None]:
        reader = self.reader
        if opener == ALL_BEGIN:
            yield from reader.expect(BEGIN)
        name = yield from reader.take_while(NAME)
        yield from reader.expect(SEPARATOR)
        yield from reader.skip_spaces()
        name_in_line = yield from reader.take_while(NAME)
        if name_in_line:
            name = name_in_line
            yield from reader.expect(FENCE)
        arguments = parsed_json((yield from reader.take_json()))
        if name_in_line:
            yield from reader.expect(FENCE_END)
        yield from reader.expect(END)
        self.emit_call(tool_call(name, arguments))
        yield from reader.take_one_of(ALL_END)
