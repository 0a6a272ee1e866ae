"""JSON bodies of routes that read them by themselves, after looking at their type."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Body = TypeVar("Body", bound=BaseModel)

NOT_DECLARED = "the body must be declared as Content-Type: application/json"


async def json_body(request: Request, model: type[Body]) -> Body:
    """The body as ``model``, of a `JsonRoute`. Raises what a route that declares it would.

    Anything not declared to be JSON is refused: a web page may send other types to any server that
    its reader's machine can reach, without asking.
    """
    _require_json(request)
    try:
        value = await request.json()
    except json.JSONDecodeError as error:
        wrong = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}
        raise RequestValidationError([wrong]) from None
    return await _validated(model.model_validate, value)


async def json_of_texts(request: Request, model: type[Body]) -> Body:
    """As `json_body`, for texts of gigabytes: they are copied once, while other threads wait."""
    _require_json(request)
    return await _validated(model.model_validate_json, await request.body())


async def _validated(validate: Callable[[Any], Body], value: Any) -> Body:
    try:
        return await asyncio.to_thread(validate, value)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in wrong]
        ) from None


def _require_json(request: Request) -> None:
    if content_type(request) != "application/json":
        raise HTTPException(415, NOT_DECLARED)


def content_type(request: Request) -> str:
    """Without parameters, in lower case; empty where there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def openapi_body(model: type[BaseModel], **others: dict[str, Any]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body by itself.

    ``others``: further content types, with their schemas.
    """
    schema = model.model_json_schema()
    content = {"application/json": {"schema": schema}} | {
        name: {"schema": other} for name, other in others.items()
    }
    return {"requestBody": {"required": True, "content": content}}
