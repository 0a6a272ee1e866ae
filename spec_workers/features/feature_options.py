"""The options of whoever records features: group ``feature_ring`` of a draft's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from rollout.errors import InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.features.feature_recorder import FeatureRecorder
from spec_workers.features.feature_ring import DTYPES, FeatureRing
from spec_workers.target import TargetWorker

_FIELD = "spec.feature_ring"


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureRingOptions:
    """How much of what is rolled out is recorded. Checked when made."""

    num_bytes: int = 0  # of shared memory; 0: nothing is recorded
    dtype: str | None = None  # float32, bfloat16 or float16; default: the target's
    every: int = 1  # record one request in so many, fewer where the ring turns over too fast

    def __post_init__(self) -> None:
        for name, least in (("num_bytes", 0), ("every", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InvalidInputError(f"{_FIELD}.{name}", value, f"must be an integer >= {least}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidInputError(
                f"{_FIELD}.dtype", self.dtype, f"must be null or one of {', '.join(DTYPES)}"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> Self:
        """Raises InvalidInputError, also for an option there is not."""
        known = [field.name for field in fields(cls)]
        if options is not None and not isinstance(options, Mapping):
            raise InvalidInputError(_FIELD, options, f"must be a mapping of {', '.join(known)}")
        for name, value in (options or {}).items():
            if name not in known:
                raise InvalidInputError(
                    f"{_FIELD}.{name}", value, f"is no option; there are {', '.join(known)}"
                )
        return cls(**(options or {}))

    def recorder(self, target: TargetWorker, drafted: AuxHiddenStates) -> FeatureRecorder | None:
        """The recorder of what a draft reads, and of the final hidden states its labels come from.

        Raises InvalidInputError for a ring too small for its sequences, WeightUpdateError where
        shared memory has no room.
        """
        if not self.num_bytes:
            return None
        ring = FeatureRing(
            self.num_bytes,
            drafted | AuxHiddenStates(final=True),
            target.model.spec.hidden_size,
            DTYPES[self.dtype] if self.dtype else target.model.dtype,
            field=f"{_FIELD}.num_bytes",
        )
        return FeatureRecorder(ring, self.every)
