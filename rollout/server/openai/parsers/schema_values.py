"""Arguments that models write as plain text, as the JSON values that their schema asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.server.openai.parsers.text_reader import UnreadableError
from rollout.server.openai.parsers.tool_calls import parsed_json

_PYTHON_NAMES: Mapping[str, Any] = {"True": True, "False": False, "None": None}


def schema_value(text: str, parameters: Any, name: str) -> Any:
    """The value of one argument: itself where the schema wants a string, else what it is as JSON.

    Text that is not JSON stays text, so that the tool reports the mistake. ``parameters``: the
    function's JSON schema, which may be any value.
    """
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = parsed_json(text)
    except UnreadableError:
        return text if "string" in types else _PYTHON_NAMES.get(text.strip(), text)
    return value if "string" not in types or _type(value) & types else text


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema allows, as far as it says; empty: it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    of_any = schema.get("anyOf", schema.get("oneOf"))
    return _union(_own_types, of_any if isinstance(of_any, list) else [schema])


def _own_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    types = schema.get("type", [])
    if not types and isinstance(schema.get("enum"), list):
        return _union(_type, schema["enum"])
    return {
        each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)
    }


def _union(names: Callable[[Any], set[str]], values: Sequence[Any]) -> set[str]:
    return {name for value in values for name in names(value)}


def _type(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if value is None:
        return {"null"}
    names = {int: {"integer", "number"}, float: {"number"}, str: {"string"}, list: {"array"}}
    return names.get(type(value), {"object"})
