"""Weight versions of parts: which follow an update, and which one it starts from."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.errors import InvalidInputError

TARGET = "target"
"""The part whose version tokens carry. Others only propose: their updates leave it alone."""


def next_versions(
    in_use: Mapping[str, int], parts: frozenset[str], given: int | None
) -> dict[str, int]:
    """The versions of parts after an update of them.

    ``given`` numbers the target where it is among the parts, else all of them. No token carries a
    draft's, so that one may be given twice.
    """
    following = {part: in_use[part] + 1 for part in parts}
    if given is None:
        return following
    if TARGET in parts and given == in_use[TARGET]:
        raise InvalidInputError("weight_version", given, "must differ from the one in use")
    return following | dict.fromkeys({TARGET} & parts or parts, given)


def require_base(
    in_use: Mapping[str, int], parts: frozenset[str], base_version: int | None
) -> None:
    """Raises InvalidInputError where an update of these parts is the difference to a version that
    is not in use."""
    found = {in_use[part] for part in {TARGET} & parts or parts}
    if base_version is not None and found != {base_version}:
        listed = ", ".join(map(str, sorted(found)))
        raise InvalidInputError(
            "base_version", base_version,
            f"an update was missed or made twice: the weights in use are version {listed}. Send "
            "the difference to it, or a full update",
        )  # fmt: skip
