"""The options of a weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Self

from rollout.errors import InvalidInputError
from rollout.validation import checked_flag, checked_seconds
from rollout.weights.lora import LoraScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateOptions:
    """The keywords every update call takes."""

    selector: str = "all"  # or one part: target, draft, draft_step_<i>
    # Requests in flight recompute their KV; the prefix cache goes either way. An update that leaves
    # the target alone leaves all of it alone too.
    flush_cache: bool = True
    abort_all_requests: bool = False  # requests in flight end with what they have
    # The target's where the update reaches it, else that of the parts it reaches. Default: one more
    # than the one in use.
    weight_version: int | None = None
    # Names that do not come keep their values; else each must come. Where none comes, a
    # `weight_version` renames the weights.
    partial: bool = False
    # The version that what comes is the difference to: refused unless it is the one in use. Then
    # `partial`, and places of tensors may come (`delta`).
    base_version: int | None = None
    lora_scaling: LoraScaling | None = None  # adapters come (`lora`), scaled so; then `partial`
    check_finite: bool = False  # refuse NaN and infinities
    timeout: float = 300.0  # seconds without a call after which an open update counts as abandoned

    def __post_init__(self) -> None:
        """Raises InvalidInputError. Which selectors there are `WeightParts` says."""
        for name in ("flush_cache", "abort_all_requests", "partial", "check_finite"):
            checked_flag(getattr(self, name), name)
        checked_seconds(self.timeout, "timeout")
        given = self.lora_scaling
        if given is not None:
            for scaling in given.values() if isinstance(given, Mapping) else [given]:
                if type(scaling) not in (int, float) or not isfinite(scaling):
                    raise InvalidInputError("lora_scaling", scaling, "must be a finite number")
        for name in ("weight_version", "base_version"):
            version = getattr(self, name)
            if version is not None and not (type(version) is int and 0 <= version < 2**63):
                raise InvalidInputError(name, version, "must be an integer >= 0")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises InvalidInputError, also for a keyword there is not."""
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                raise InvalidInputError(name, value, f"is no option; there are {', '.join(known)}")
        is_difference = any(
            options.get(name) is not None for name in ("base_version", "lora_scaling")
        )
        return cls(**{"partial": is_difference, **options})


def refuse_options_of_part(options: Mapping[str, Any]) -> None:
    """Raise InvalidInputError for options of a call that brings a part of an open update."""
    if options:
        names = ", ".join(options)
        raise InvalidInputError("options", names, "are set by begin_weight_update alone")
