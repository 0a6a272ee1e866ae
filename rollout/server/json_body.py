"""JSON bodies that may be long: parsed off the event loop."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Body = TypeVar("Body", bound=BaseModel)


async def json_body(request: Request, model: type[Body]) -> Body:
    """The body as ``model``. Raises RequestValidationError, as a route that declares it would.

    Anything not declared to be JSON is refused: a web page may send other types to any server that
    its reader's machine can reach, without asking.
    """
    if content_type(request) != "application/json":
        raise HTTPException(415, "the body must be declared as Content-Type: application/json")
    body = await request.body()
    try:
        return await asyncio.to_thread(model.model_validate_json, body)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in wrong]
        ) from None


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
