"""What a comparison of trainer and engine found."""

from __future__ import annotations

import enum
import math
from dataclasses import asdict, dataclass, field
from typing import Any


class Cause(enum.StrEnum):
    """Why logprobs differ. The order is that of suspects: earlier ones explain later ones."""

    DROPOUT = "dropout"
    MISSING_TENSOR = "missing_tensor"
    ADAPTER = "adapter"
    STALE_WEIGHTS = "stale_weights"
    DTYPE = "dtype"
    POSITIONS = "positions"
    ROPE = "rope"
    NORM = "norm"
    ROUTER = "router"
    MASK = "mask"
    ATTENTION_IMPLEMENTATION = "attention_implementation"
    LOGITS = "logits"
    SAMPLING = "sampling"
    ROUNDING = "rounding"


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cause, the module, tensor or setting that shows it, and a sentence on it."""

    cause: Cause
    where: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDifference:
    """The difference of one op of the trainer from the engine's on the same input."""

    name: str  # of the trainer's module, or rotary, attention, residual, logits
    layer: int | None  # None: outside the layers
    difference: float  # largest |trainer - engine| of a row, over the row's largest |engine|
    rounding: float  # the largest difference that rounding explains
    share: float  # of all ops' mean squared differences
    alternative: str = ""  # the change of the engine's op that explains the difference
    precision: str = ""  # the lower dtype that the trainer's output has

    @property
    def is_explained(self) -> bool:
        """Whether rounding of the dtype explains the difference."""
        return self.difference <= self.rounding

    @property
    def where(self) -> str:
        """The op's name, with its layer."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of some tokens."""

    min: float
    mean: float
    max: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The differences of a trainer's model and an engine on some rollouts.

    Logprobs are natural. ``engine`` in a name is the engine now, by `RolloutEngine.score`.
    """

    rollouts: int
    tokens: int
    max_difference: float  # of the sampled tokens' logprobs, trainer against engine
    mean_difference: float
    max_logit_difference: float  # over the whole vocabulary and every row
    engine_difference: float  # largest, engine against the rollout's logprobs of this version
    ratio: Spread  # probability by the trainer over the rollout's, or the engine's without one
    ratios: list[tuple[float, int]]  # middle of a bin and its tokens; the outer ones have the rest
    outside: float  # share of ratios outside 0.8 to 1.2
    divergence: Spread  # KL(engine || trainer) over the whole vocabulary, in nats
    entropy: tuple[float, float]  # mean, of trainer and engine
    flips: float  # share of rows whose most likely token differs
    by_version: dict[int, Spread]  # of |trainer - engine|, logprobs
    by_position: dict[int, Spread]  # the same, by the first position of a range in the output
    ops: list[OpDifference]  # the largest in units of its rounding first
    suspects: list[Suspect]  # the likeliest first; none: nothing beyond float32's rounding
    seconds: float
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON has them; null for what is no finite number."""
        found: dict[str, Any] = _finite(asdict(self))
        return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
