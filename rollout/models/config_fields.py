"""Fields of config.json that are read alike for every family."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rollout.errors import CheckpointError, UnsupportedModelError

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def token_ids(*fields: object) -> tuple[int, ...]:
    """The union of fields that are null, a token or a list of tokens, in order of first mention."""
    ids: dict[int, None] = {}
    for field in fields:
        values: Iterable[object] = field if isinstance(field, list) else [field]
        for value in values:
            if isinstance(value, int):
                ids[value] = None
            elif value is not None:
                raise CheckpointError(
                    f"eos_token_id={field!r} must be a token id or a list of them"
                )
    return tuple(ids)


def dtype_field(name: object) -> torch.dtype | None:
    """The dtype of that name; None for None. Raises UnsupportedModelError for another one."""
    if name is None:
        return None
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UnsupportedModelError(
            f"config.json: dtype={name!r} is not implemented; only {', '.join(_DTYPES)}"
        )
    return dtype
