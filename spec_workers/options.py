"""Checks of workers' options, before a model is loaded."""

from __future__ import annotations

from rollout.errors import InvalidInputError
from rollout.types import MAX_TREE_NODES


def check_number(
    name: str,
    value: object,
    maximum: float,
    kind: type[int] | type[float] = float,
    *,
    minimum: float = 0,
) -> None:
    """Raise InvalidInputError unless ``value`` is a number in [minimum, maximum], and whole where
    ``kind`` is int."""
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not minimum <= value <= maximum:
        noun = "an integer" if kind is int else "a number"
        raise InvalidInputError(
            f"spec.{name}", value, f"must be {noun} in [{minimum:g}, {maximum:g}]"
        )


def check_budget(value: object) -> None:
    if not isinstance(value, str) or value not in ("learned", "fixed"):
        raise InvalidInputError("spec.budget", value, "must be learned or fixed")


def check_topk(topk: object, num_steps: int) -> None:
    """Raise InvalidInputError unless the nodes that are expanded fit an ancestor mask."""
    maximum = (MAX_TREE_NODES - 1) // max(1, num_steps - 1)
    check_number("topk", topk, MAX_TREE_NODES - 1, int, minimum=1)
    if isinstance(topk, int) and topk > maximum:
        raise InvalidInputError(
            "spec.topk", topk,
            f"topk * (num_steps - 1) nodes are expanded, at most {MAX_TREE_NODES - 1}: with "
            f"num_steps={num_steps} it can be {maximum} at most",
        )  # fmt: skip
