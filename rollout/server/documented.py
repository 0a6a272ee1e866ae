"""The OpenAPI descriptions of answers that routes write by themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None  # the field that is wrong
    code: int | str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ChangeBody(BaseModel):
    """``{"success", "message"}`` and what the call has to tell."""

    model_config = ConfigDict(extra="allow")

    success: bool
    message: str


Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "4XX": {"model": ErrorBody, "description": "Refused: nothing was done"},
    "5XX": {"model": ErrorBody, "description": "Not now, or never: the message says why"},
}
CHANGED: Responses = {200: {"model": ChangeBody}}
EVENTS: Responses = {200: {"content": {"text/event-stream": {}}}}
"""With ``stream``; else JSON."""
