"""Dtypes by the names that cross process boundaries."""

from __future__ import annotations

import torch

from rollout.errors import InvalidInputError


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def named_dtype(value: object, field: str) -> torch.dtype:
    """The dtype called ``bfloat16`` or ``torch.bfloat16``; a torch.dtype is its own name.

    Any that torch has: which of them weights may have is for the transaction to say. Raises
    InvalidInputError, naming ``field``, for anything else.
    """
    name = str(value) if isinstance(value, (str, torch.dtype)) else ""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidInputError(field, value, "must be the name of a dtype, as bfloat16")
    return dtype
