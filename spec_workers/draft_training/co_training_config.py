"""How a draft follows the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout.errors import InvalidInputError
from spec_workers.draft_training.config import TrainingConfig

FOLLOWING = TrainingConfig(learning_rate=3e-4, warmup_steps=10)
"""Slower than a draft is trained with from nothing: what it knows is nearly right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoTrainingConfig:
    batch_rows: int = 1024  # least positions of an optimizer step, where there are as many
    max_len: int = 2048  # tokens of a sequence; longer ones are cut up
    max_bytes: int = 1 << 30  # of the features of recent rollouts, held-out ones included
    held_out_every: int = 6  # one prompt in so many is never trained on
    max_held_out: int = 48  # sequences to judge by, the newest ones
    min_gain: float = 0.0  # accept length that a new draft must have gained
    max_refusals: int = 8  # in a row; then training goes on from the draft in use
    seconds: float | None = 5.0  # of training in a round
    steps: int | None = None  # likewise, of the optimizer; whichever ends first
    max_replay: float = 16.0  # times a row is trained on, on the average
    seed: int = 0  # of the order of training

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_rows", 1), ("max_len", 8), ("max_bytes", 1), ("held_out_every", 2),
            ("max_held_out", 1), ("max_refusals", 1), ("steps", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name == "steps":
                continue
            if type(value) is not int or value < least:
                raise InvalidInputError(name, value, f"must be an integer >= {least}")
        if not 0 <= self.min_gain < math.inf:
            raise InvalidInputError("min_gain", self.min_gain, "must be >= 0 and finite")
        for name in ("max_replay", "seconds"):
            value = getattr(self, name)
            if value is None and name == "seconds":
                continue
            if not 0 < value < math.inf:
                raise InvalidInputError(name, value, "must be > 0 and finite")
        if self.seconds is None and self.steps is None:
            raise InvalidInputError("seconds", None, "must be given where steps is not")
