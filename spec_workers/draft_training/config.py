"""How a draft is trained."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    num_steps: int = 4  # of the chain that is unrolled; an MTP chain has no more than its own
    matrix_learning_rate: float = 0.01  # Muon's
    learning_rate: float = 1e-3  # AdamW's: head and norms
    warmup_steps: int = 20
    autocast: bool = True  # products in bfloat16; the parameters stay float32

    def __post_init__(self) -> None:
        for name in ("num_steps", "warmup_steps"):
            if getattr(self, name) < 1:
                raise InvalidInputError(name, getattr(self, name), "must be >= 1")
        for name in ("matrix_learning_rate", "learning_rate"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(name, getattr(self, name), "must be > 0")
