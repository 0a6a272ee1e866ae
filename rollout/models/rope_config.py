"""Reads the rotary embedding from config.json, in transformers' layouts before 5 and since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.layers.rope import RopeSpec, RopeType

_REQUIRED: Mapping[RopeType, frozenset[str]] = {
    RopeType.DEFAULT: frozenset(),
    RopeType.LINEAR: frozenset({"factor"}),
    RopeType.DYNAMIC: frozenset({"factor"}),
    RopeType.LLAMA3: frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    # Without factor, it follows from the two context lengths.
    RopeType.YARN: frozenset(),
    RopeType.LONGROPE: frozenset({"short_factor", "long_factor"}),
}
_YARN = frozenset(
    {"factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"}
)
_LONGROPE = frozenset({"factor", "attention_factor"})
_COMMON = frozenset(
    {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "finetuned"}
)


def without_partial_rotary(
    config: Mapping[str, Any], default: float
) -> tuple[Mapping[str, Any], float]:
    """The config as if a head were rotated whole, and the part of it that is.

    ``default``: of ``partial_rotary_factor``. Raises CheckpointError for a malformed one.
    """
    factor = config.get("partial_rotary_factor", default)
    plain = {name: value for name, value in config.items() if name != "partial_rotary_factor"}
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(given := config.get(field), Mapping):
            factor = given.get("partial_rotary_factor", factor)
            plain[field] = {name: given[name] for name in given if name != "partial_rotary_factor"}
    if not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor={factor!r} must be in (0, 1]")
    return plain, factor


def rope_spec(config: Mapping[str, Any], max_position_embeddings: int) -> RopeSpec:
    """The rotary embedding of a config.

    Since transformers 5, ``rope_parameters`` holds everything. Before, ``rope_theta`` and
    ``rope_scaling`` were separate fields. Raises UnsupportedModelError for a type or parameter not
    implemented, CheckpointError for a missing or malformed one.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given: Mapping[str, Any] = config.get(field) or {}
    params = {name: value for name, value in given.items() if value is not None}
    if params.pop("partial_rotary_factor", 1) != 1:
        raise UnsupportedModelError(
            f"config.json: {field}.partial_rotary_factor={given['partial_rotary_factor']!r} "
            "is not implemented; only 1 is"
        )
    name = params.get("rope_type", params.get("type", "default"))
    if name not in list(RopeType):
        raise UnsupportedModelError(
            f"config.json: {field}.rope_type={name!r} is not implemented; only "
            f"{', '.join(RopeType)} are"
        )
    rope_type = RopeType(name)
    own = _own(rope_type)
    for key in sorted(params.keys() - own - _COMMON):
        raise UnsupportedModelError(
            f"config.json: {field}.{key}={params[key]!r} is not implemented for {name} rope"
        )
    for key in sorted(_REQUIRED[rope_type] - params.keys()):
        raise CheckpointError(f"config.json: {field}.{key} is missing for {name} rope")
    for key in sorted(_REQUIRED[RopeType.LONGROPE] & params.keys()):
        params[key] = _factors(params[key], f"{field}.{key}")
    for key in sorted(own & params.keys() - {"truncate"} - _REQUIRED[RopeType.LONGROPE]):
        if not isinstance(params[key], int | float) or params[key] <= 0:
            raise CheckpointError(f"config.json: {field}.{key}={params[key]!r} must be > 0")

    original = config.get("original_max_position_embeddings") or params.get(
        "original_max_position_embeddings", max_position_embeddings
    )
    if rope_type in (RopeType.YARN, RopeType.LONGROPE):
        params.setdefault("factor", max_position_embeddings / original)
    if rope_type is RopeType.DYNAMIC:
        original = max_position_embeddings
    return RopeSpec(
        rope_type=rope_type,
        rope_theta=float(params.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        original_max_position_embeddings=original,
        **{key: params[key] for key in own & params.keys()},
    )


def check_factors(rope: RopeSpec, rotary_dim: int) -> None:
    """Raise CheckpointError unless LongRoPE has a factor for each wavelength."""
    short, long = len(rope.short_factor), len(rope.long_factor)
    if rope.rope_type is RopeType.LONGROPE and {short, long} != {rotary_dim // 2}:
        raise CheckpointError(
            f"config.json: short_factor and long_factor have {short} and {long} entries for "
            f"{rotary_dim} rotated dimensions"
        )


def rope_fields(rope: RopeSpec, max_context_len: int) -> dict[str, Any]:
    """Fields that make `rope_spec` return ``rope``; they override another model's fields."""
    names = {"rope_type", "rope_theta", "original_max_position_embeddings"} | _own(rope.rope_type)
    given = {name: getattr(rope, name) for name in sorted(names)}
    is_dynamic = rope.rope_type is RopeType.DYNAMIC
    return {
        "rope_parameters": {name: value for name, value in given.items() if value is not None},
        "rope_scaling": None,
        "rope_theta": rope.rope_theta,
        "original_max_position_embeddings": None,
        "max_position_embeddings": (
            rope.original_max_position_embeddings if is_dynamic else max_context_len
        ),
    }


def _own(rope_type: RopeType) -> frozenset[str]:
    """Parameters that only this type has."""
    optional = {RopeType.YARN: _YARN, RopeType.LONGROPE: _LONGROPE}
    return _REQUIRED[rope_type] | optional.get(rope_type, frozenset())


def _factors(value: object, name: str) -> tuple[float, ...]:
    if isinstance(value, list | tuple) and all(isinstance(x, int | float) and x > 0 for x in value):
        return tuple(float(x) for x in value)
    raise CheckpointError(f"config.json: {name}={value!r} must be a list of numbers > 0")


def context_limit(rope: RopeSpec, max_position_embeddings: int) -> int:
    """The longest context in tokens that the embedding was made for."""
    match rope.rope_type:
        case RopeType.LINEAR | RopeType.DYNAMIC:
            return int(max_position_embeddings * rope.factor)
        case RopeType.YARN:
            stretched = int(rope.original_max_position_embeddings * rope.factor)
            return max(max_position_embeddings, stretched)
        case _:
            return max_position_embeddings
