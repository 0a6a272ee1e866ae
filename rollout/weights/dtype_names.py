"""The dtypes weights travel in, by the names that cross process boundaries."""

from __future__ import annotations

import torch

from rollout.errors import InvalidInputError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def named_dtype(value: object, field: str) -> torch.dtype:
    """The dtype called ``bfloat16`` or ``torch.bfloat16``; a torch.dtype is its own name.

    Raises InvalidInputError, naming ``field``, for anything that weights do not travel in.
    """
    name = dtype_name(value) if isinstance(value, torch.dtype) else value
    if not isinstance(name, str) or name.removeprefix("torch.") not in _DTYPES:
        raise InvalidInputError(field, value, f"must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name.removeprefix("torch.")]
