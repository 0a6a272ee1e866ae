"""Calls that a grammar forces: the whole output is JSON, and has no marks around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout.errors import InvalidInputError
from rollout.server.openai.parsers.text_reader import Reading
from rollout.server.openai.parsers.tool_calls import (
    ToolCallParser,
    json_call,
    parsed_json,
    tool_call,
)

_DEFINITIONS = ("$defs", "definitions")


class NamedCallParser(ToolCallParser):
    """The arguments of the only function there is."""

    openers = ()
    needs_no_opener = True

    def read_calls(self, opener: str) -> Reading[None]:
        text = yield from self.reader.take_json()
        (name,) = self.tools
        self.emit_call(tool_call(name, parsed_json(text)))


class RequiredCallsParser(ToolCallParser):
    """`[{"name": ..., "parameters": {...}}, ...]`."""

    openers = ()
    needs_no_opener = True

    def read_calls(self, opener: str) -> Reading[None]:
        text = yield from self.reader.take_json("[")
        for call in [json_call(value) for value in parsed_json(text)]:
            self.emit_call(call)


def named_call_schema(parameters: Any) -> str:
    return _written(parameters or {"type": "object"})


def required_calls_schema(tools: Mapping[str, Any], max_calls: int | None) -> str:
    """The JSON schema of one call or several, of any of the functions.

    Raises InvalidInputError for definitions of one name that differ.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for name, schema in tools.items():
        parameters = dict(schema or {"type": "object"})
        for place in _DEFINITIONS:  # references to them begin at the root
            defined = parameters.pop(place, {})
            if not isinstance(defined, dict):
                raise InvalidInputError("tools", defined, f"{place} must be an object")
            for key, definition in defined.items():
                known = definitions.setdefault(place, {}).setdefault(key, definition)
                if known != definition:
                    raise InvalidInputError(
                        "tools", key, f"is defined twice in {place}, and differs: rename one"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
    if max_calls is not None:
        schema["maxItems"] = max_calls
    return _written(schema)


def _written(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise InvalidInputError("tools", "a schema", "is nested too deep") from None
