"""How a draft is trained."""

from __future__ import annotations

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
            if getattr(self, name) < 1:
                raise InvalidInputError(name, getattr(self, name), "must be >= 1")
        if not self.learning_rate > 0:
            raise InvalidInputError("learning_rate", self.learning_rate, "must be > 0")
