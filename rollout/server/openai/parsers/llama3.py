"""Calls in JSON as Llama 3 writes them."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.server.openai.parsers.text_reader import Reading, UnreadableError
from rollout.server.openai.parsers.tool_calls import ToolCallParser, json_call, parsed_json

PYTHON_TAG = "<|python_tag|>"

_ARGUMENTS = frozenset({"parameters", "arguments"})


class Llama3Parser(ToolCallParser):
    """`{"name": ..., "parameters": {...}}` at the beginning, or after `<|python_tag|>`.

    Semicolons separate several calls. An answer in JSON may look the same, so an object without the
    tag is a call only if it names a known function and its arguments.
    """

    openers = (PYTHON_TAG,)
    markers = (PYTHON_TAG,)
    needs_no_opener = True

    def read_calls(self, opener: str) -> Reading[None]:
        while True:
            text = yield from self.reader.take_json()
            value = parsed_json(text)
            call = json_call(value)
            if opener != PYTHON_TAG and not self._looks_like_call(value):
                raise UnreadableError
            self.emit_call(call)
            if (yield from self.reader.take_one_of(";")) is None:
                return

    def _looks_like_call(self, value: Mapping[str, object]) -> bool:
        return value["name"] in self.tools and not _ARGUMENTS.isdisjoint(value)
