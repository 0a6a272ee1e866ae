"""Answers in JSON that every reader takes, whatever a client's text or a model's numbers hold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse


def json_bytes(value: Any) -> bytes:
    """UTF-8. Half of a surrogate pair, which has no encoding, stays the escape that it is in JSON;
    infinities and NaN, which JSON does not have, become null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


class JsonAnswer(JSONResponse):
    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(each) for each in value]
    return value
