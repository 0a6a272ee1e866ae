"""Settings of draft training and co-training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    num_steps: int = 3  # guesses in a row that are unrolled
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    autocast: bool = True  # matrix products in bfloat16; parameters stay float32

    def __post_init__(self) -> None:
        for name in ("num_steps", "warmup_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidInputError(name, value, "must be an integer >= 1")
        if not 0 < self.learning_rate < math.inf:
            raise InvalidInputError("learning_rate", self.learning_rate, "must be > 0 and finite")


FOLLOWING = TrainingConfig(learning_rate=3e-4, warmup_steps=10)
"""Optimizer settings for co-training, with a low rate: the draft is nearly right already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoTrainingConfig:
    """Co-training's data, its duration, and when a new draft replaces the one in use."""

    batch_rows: int = 1024  # rows of an optimizer step at least, if there are as many
    max_len: int = 2048  # tokens of a sequence; longer ones are split
    max_bytes: int = 1 << 30  # features of recent rollouts, held-out ones included
    held_out_every: int = 6  # one prompt in this many is never trained on
    max_held_out: int = 48  # newest held-out sequences to judge by
    min_gain: float = 0.0  # accept length that a new draft must gain
    max_refusals: int = 8  # in a row; then training restarts from the draft in use
    seconds: float | None = 5.0  # of training per round
    steps: int | None = None  # optimizer steps per round; whichever limit comes first
    max_replay: float = 16.0  # times that a row is trained on, on average
    seed: int = 0  # of the order of training

    def __post_init__(self) -> None:
        for name, minimum in (
            ("batch_rows", 1), ("max_len", 8), ("max_bytes", 1), ("held_out_every", 2),
            ("max_held_out", 1), ("max_refusals", 1), ("steps", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name == "steps":
                continue
            if type(value) is not int or value < minimum:
                raise InvalidInputError(name, value, f"must be an integer >= {minimum}")
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
