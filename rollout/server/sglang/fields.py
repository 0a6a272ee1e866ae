"""Fields of requests that this server does not have."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout.errors import InvalidInputError


class Body(BaseModel):
    """A field there is not is refused: it would be without the effect its sender expects."""

    model_config = ConfigDict(extra="forbid")


def refuse_unknown(fields: Mapping[str, Any] | None, harmless: Set[str], prefix: str = "") -> None:
    """Raises InvalidInputError for the first that is set and would change the answer.

    What is null, false or empty asks for nothing, whatever its name. ``harmless`` ones change no
    token and nothing that is answered.
    """
    for name, value in (fields or {}).items():
        is_off = value is None or value is False or value in ("", [], {})
        if not is_off and name not in harmless:
            raise InvalidInputError(prefix + name, value, "is not supported: leave it out")
