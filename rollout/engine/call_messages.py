"""The messages by which rank 0 tells other ranks of its calls: JSON, and bytes that follow it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeGuard

import torch

from rollout.engine.draft_corpus import CorpusDelta
from rollout.errors import InvalidInputError
from rollout.parallel import RankGroup
from rollout.types import SamplingParams
from rollout.weights.manifest import (
    TensorSpec,
    dtype_name,
    manifest_from_json,
    manifest_to_json,
)
from rollout.weights.receiver import described_source
from rollout.weights.source import WeightSource


def encoded_call(name: str, /, *arguments: Any, **options: Any) -> bytes:
    """The message of a call. Raises InvalidInputError for an argument that cannot be sent."""
    encoded_options = {option: _encoded(each) for option, each in options.items()}
    call = [name, [*map(_encoded, arguments)], encoded_options]
    try:
        return json.dumps(call, default=_to_json).encode()
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            name, "a call", f"cannot be broadcast to other ranks: {error}; pass plain values"
        ) from error


def decoded_call(message: bytes, group: RankGroup) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, arguments and options of a call; reads the bytes that follow its message."""
    name, arguments, options = json.loads(message)
    decoded_arguments = [_decoded(each, group) for each in arguments]
    return name, decoded_arguments, {name: _decoded(each, group) for name, each in options.items()}


def _encoded(value: Any) -> list[Any]:
    """The kind of an argument and its value in JSON, so that no caller's own object is taken for
    one of another kind."""
    if isinstance(value, SamplingParams):
        fields = asdict(value)
        fields["logit_bias"] = list(value.logit_bias.items())
        return ["params", fields]
    if isinstance(value, WeightSource):
        return ["weights", value.description()]
    if _are_deltas(value):
        return ["deltas", len(value)]
    if isinstance(value, Mapping) and all(isinstance(spec, TensorSpec) for spec in value.values()):
        return ["manifest", manifest_to_json(value)]
    return ["", value]


def bytes_of(argument: Any) -> Iterator[bytes]:
    """The bytes of an argument that follow the message."""
    if _are_deltas(argument):
        yield from (delta.to_bytes() for delta in argument)


def _are_deltas(value: object) -> TypeGuard[list[CorpusDelta]]:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(each, CorpusDelta) for each in value)


def _to_json(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no plain value")


def _decoded(encoded: list[Any], group: RankGroup) -> Any:
    kind, value = encoded
    if kind == "params":
        value["logit_bias"] = {int(token): bias for token, bias in value["logit_bias"]}
        return SamplingParams(**value)
    if kind == "manifest":
        return manifest_from_json(value)
    if kind == "weights":
        return described_source(value, group)
    if kind == "deltas":
        return [CorpusDelta.from_bytes(group.broadcast_bytes(b"")) for _ in range(value)]
    return value
