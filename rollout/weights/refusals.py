"""Refusals of tensors: all that is wrong with them in one error, and values that are no numbers."""

from __future__ import annotations

import torch

from rollout.errors import InvalidInputError

LISTED = 8  # names in an error


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidInputError if the tensor holds NaN or infinities."""
    if not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise InvalidInputError(
            f"named_tensors[{name!r}]", f"{count} values of {tensor.numel()}",
            f"are NaN or infinite in {tensor.dtype}; the trainer has diverged, or "
            "check_finite=False takes them",
        )  # fmt: skip


def refuse_mismatched(lines: list[str]) -> None:
    """Raise InvalidInputError where there is a line, each of which says what does not fit."""
    if lines:
        more = f"; and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
        remedy = f"must match the model's own: {'; '.join(lines[:LISTED])}{more}"
        raise InvalidInputError("named_tensors", f"{len(lines)} mismatches", remedy)
