"""Checks of workers' options, before a model is loaded."""

from __future__ import annotations

from rollout.errors import InvalidInputError
from rollout.types import MAX_TREE_NODES


def check_number(
    name: str,
    value: object,
    most: float,
    kind: type[int] | type[float] = float,
    *,
    least: float = 0,
) -> None:
    """Raise InvalidInputError unless ``value`` is a number in [least, most], whole where it must
    be."""
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not least <= value <= most:
        noun = "an integer" if kind is int else "a number"
        raise InvalidInputError(f"spec.{name}", value, f"must be {noun} in [{least:g}, {most:g}]")


def check_budget(value: object) -> None:
    if not isinstance(value, str) or value not in ("learned", "fixed"):
        raise InvalidInputError("spec.budget", value, "must be learned or fixed")


def check_topk(topk: object, num_steps: int) -> None:
    """Raise InvalidInputError unless the nodes that are expanded fit an ancestor mask."""
    most = (MAX_TREE_NODES - 1) // max(1, num_steps - 1)
    check_number("topk", topk, MAX_TREE_NODES - 1, int, least=1)
    if isinstance(topk, int) and topk > most:
        raise InvalidInputError(
            "spec.topk", topk,
            f"topk * (num_steps - 1) nodes are expanded, at most {MAX_TREE_NODES - 1}: with "
            f"num_steps={num_steps} it can be {most} at most",
        )  # fmt: skip
