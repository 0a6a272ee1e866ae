"""How one weight update is to be taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOptions:
    """The keywords every update call takes."""

    selector: str = "all"  # or one part: target, draft, draft_step_<i>
    flush_cache: bool = True  # requests in flight recompute their KV; the prefix cache always goes
    abort_all_requests: bool = False  # requests in flight end with what they have
    weight_version: int | None = None  # default: one more than the one in use
    partial: bool = False  # names that do not come keep their values; else each must come
    check_finite: bool = False  # refuse NaN and infinities
    timeout: float = 300.0  # seconds without a call after which an open update counts as abandoned

    def __post_init__(self) -> None:
        version = self.weight_version
        if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
            raise InvalidInputError("weight_version", version, "must be an integer")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise InvalidInputError("timeout", self.timeout, "must be a number of seconds > 0")
