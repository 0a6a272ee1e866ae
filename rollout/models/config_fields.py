"""Reading and checking fields of config.json, alike for every family."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from rollout.errors import CheckpointError, UnsupportedModelError

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field that must be a whole number >= 1.

    Raises CheckpointError if it is not, or if it is missing and has no default.
    """
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {name}={value!r} must be a whole number >= 1")
    return value


def refuse_unimplemented(
    config: Mapping[str, Any], implemented: Mapping[str, tuple[object, ...]], by: str = ""
) -> None:
    """Raise UnsupportedModelError for a field that asks for what is not implemented.

    Args:
        implemented: for each field, the values that are. A missing field asks for nothing.
        by: the model that asks, where the message must name it.
    """
    for name, values in implemented.items():
        if name in config and config[name] not in values:
            raise UnsupportedModelError(
                f"config.json: {name}={config[name]!r} is not implemented{by and f' for {by}'}; "
                f"only {' or '.join(map(repr, values))}"
            )


def check_layer_types(kinds: Sequence[object], known: Collection[str], num_layers: int) -> None:
    """Raise UnsupportedModelError for a kind of layer that is not among the ``known`` ones,
    CheckpointError unless each layer has a kind."""
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModelError(f"config.json: layer_types has {kind!r}: not implemented")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers"
        )


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
