"""How a draft is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    num_steps: int = 3  # guesses in a row that are unrolled; an MTP chain has no more than its own
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    autocast: bool = True  # products in bfloat16; the parameters stay float32

    def __post_init__(self) -> None:
        for name in ("num_steps", "warmup_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidInputError(name, value, "must be an integer >= 1")
        if not 0 < self.learning_rate < math.inf:
            raise InvalidInputError("learning_rate", self.learning_rate, "must be > 0 and finite")
