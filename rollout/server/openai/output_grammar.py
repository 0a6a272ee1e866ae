"""The grammar that an output must obey, by OpenAI's, vLLM's and SGLang's names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout.errors import InvalidInputError
from rollout.server.body_fields import Listed, refuse_unknown

_ANY_OBJECT = {"type": "object"}

Grammar = tuple[str, str]
"""A field of SamplingParams, and its value."""


class GrammarBody(BaseModel):
    """Fields of grammars; a body may have at most one of them."""

    model_config = ConfigDict(strict=True, extra="allow")

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that is asked for. Raises InvalidInputError for several, and unknown ones."""
        found: Grammar | None = None
        for field, grammar in self._grammars():
            if found is not None:
                raise InvalidInputError(field, grammar[1], "give one grammar alone")
            found = grammar
        return found

    def _grammars(self) -> Iterator[tuple[str, Grammar]]:
        if self.response_format is not None:
            yield from _of_response_format(self.response_format)
        if self.structured_outputs is not None:
            yield from _of_structured_outputs(self.structured_outputs)
        for field, read in _READ.items():
            if getattr(self, field) is not None:
                yield field, read(getattr(self, field), field)


def _of_response_format(given: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    field, kind = "response_format", given.get("type")
    if kind == "json_object":
        yield field, _schema(_ANY_OBJECT, field)
    elif kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        yield field, _schema(schema, f"{field}.json_schema.schema")
    elif given and kind != "text":
        raise InvalidInputError(
            f"{field}.type", kind, "this server knows text, json_object and json_schema"
        )


def _of_structured_outputs(given: Mapping[str, Any]) -> Iterator[tuple[str, Grammar]]:
    field = "structured_outputs"
    unknown = {name: value for name, value in given.items() if name not in _READ_STRUCTURED}
    refuse_unknown(unknown, frozenset(), f"{field}.")
    for name, read in _READ_STRUCTURED.items():
        if given.get(name) not in (None, False):
            yield f"{field}.{name}", read(given[name], f"{field}.{name}")


def _schema(schema: Any, field: str) -> Grammar:
    if isinstance(schema, str):
        return "json_schema", schema
    if not isinstance(schema, dict):
        raise InvalidInputError(field, schema, "must be a JSON schema, an object")
    try:
        return "json_schema", json.dumps(schema)
    except RecursionError:
        raise InvalidInputError(field, schema, "is nested too deep") from None


def _regex(pattern: Any, field: str) -> Grammar:
    if not isinstance(pattern, str):
        raise InvalidInputError(field, pattern, "must be a regular expression")
    return "regex", pattern


def _ebnf(text: Any, field: str) -> Grammar:
    if not isinstance(text, str):
        raise InvalidInputError(field, text, "must be a grammar in GBNF or Lark")
    return "ebnf", text


def _choice(texts: Any, field: str) -> Grammar:
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise InvalidInputError(field, texts, "must be a list of texts, at least one")
    return "regex", "|".join(map(re.escape, texts))


_READ: Mapping[str, Callable[[Any, str], Grammar]] = {
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
}
_READ_STRUCTURED: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": lambda asked, field: _schema(_ANY_OBJECT, field),
}
