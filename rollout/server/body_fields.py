"""Types of fields that may be long, in the bodies of requests.

They are documented as the plain types are, and refused with the same words. But a list that is
wrong ends at its first wrong value: pydantic would note, and FastAPI write out, what is wrong with
each of a million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import GetCoreSchemaHandler, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core.core_schema import CoreSchema

from rollout.server.json_pieces import Integers

T = TypeVar("T")


@dataclass(frozen=True)
class _EndsAtFirstError:
    """pydantic's own FailFast, but unions want hashable members."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "list"
        return {**schema, "fail_fast": True}


Listed = Annotated[list[T], _EndsAtFirstError()]


def _known_ids(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Token ids that were found to be integers when they were parsed are not looked at again."""
    if type(value) is Integers:
        return value
    if type(value) is list and value and all(type(ids) is Integers for ids in value):
        return value
    return check(value)


KnownIds = WrapValidator(_known_ids)


def _known_biases(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Checks the first wrong one alone, if there is one."""
    if isinstance(value, Mapping):
        for token, bias in value.items():
            if type(bias) is not float and type(bias) is not int:
                return check({token: bias})
    return check(value)


Biases = Annotated[dict[str, float], WrapValidator(_known_biases)]
"""By token id."""
