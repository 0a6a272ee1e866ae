"""Changes of tensors: values at the places that changed, as tensors that any transport carries.

A change of the checkpoint tensor NAME comes as two tensors, in any order: ``NAME:elements``,
ascending indices into the flattened tensor, or ``NAME:rows``, ascending indices of its first
dimension; and ``NAME:values``, the new values there: ``[n]``, or ``[n, ...]`` with the other
dimensions. Values are replaced and never added to, so nothing drifts. LoRA adapters (`lora`) come
in the same way. A rank writes the changes that lie in the slice it stores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import TensorSlice, WeightLoader
from rollout.weights.lora import (
    LORA_A,
    LORA_B,
    LoraChange,
    LoraScaling,
    adapted_spec,
    split_lora_name,
)
from rollout.weights.manifest import Manifest, TensorSpec

_PLACES = ("elements", "rows")
VALUES = "values"
_INDICES = (torch.int32, torch.int64)


def split_name(name: str) -> tuple[str, str] | None:
    """The changed tensor's name and what of the change this is; None for a tensor itself."""
    base, colon, kind = name.rpartition(":")
    if colon and kind in (*_PLACES, VALUES):
        return base, kind
    return split_lora_name(name)


def changed_specs(
    incoming: Manifest, loaders: Mapping[str, WeightLoader], *, is_all: bool
) -> dict[str, TensorSpec]:
    """The tensors that changes in a manifest are of, as wholes.

    A tensor that ``loaders`` does not have is left to who checks names. Raises InvalidInputError
    for two that do not fit each other; where the manifest ``is_all`` that will come, also for one
    without the other.
    """
    changes: dict[str, dict[str, TensorSpec]] = {}
    for name, spec in incoming.items():
        if (base_kind := split_name(name)) is not None:
            changes.setdefault(base_kind[0], {})[base_kind[1]] = spec
    found: dict[str, TensorSpec] = {}
    for base, given in changes.items():
        if given.keys() == {LORA_A, LORA_B}:
            found[base] = adapted_spec(base, given[LORA_A], given[LORA_B], loaders.get(base))
        elif len(given) == 2 and VALUES in given:
            found[base] = _changed_spec(base, given, loaders.get(base))
        elif is_all or len(given) > 1:
            raise _unpaired(base, given)
    return found


def _changed_spec(
    base: str, given: Mapping[str, TensorSpec], loader: WeightLoader | None
) -> TensorSpec:
    values = given[VALUES]
    if loader is None:
        return values
    (kind,) = given.keys() - {VALUES}
    indices, shape = given[kind], loader.shape
    expected = (*indices.shape, *shape[1:]) if kind == "rows" else indices.shape
    if len(indices.shape) != 1 or indices.dtype not in _INDICES or values.shape != expected:
        raise InvalidInputError(
            f"named_tensors['{base}:{kind}']", indices,
            f"must be int32 or int64 [n], with values of {list(expected)}, not {values}",
        )  # fmt: skip
    most = shape[0] if kind == "rows" else prod(shape)
    if indices.shape[0] > most:  # receivers allocate what was announced
        raise InvalidInputError(
            f"named_tensors['{base}:{kind}']", indices, f"must be at most {most}: there are no more"
        )
    return TensorSpec(shape, values.dtype)


def _unpaired(base: str, given: Collection[str]) -> InvalidInputError:
    return InvalidInputError(
        f"named_tensors['{base}']", ", ".join(sorted(given)),
        f"needs {base}:{VALUES} and one of {base}:elements and {base}:rows, or lora_A and lora_B",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class TensorChange:
    """Values of one tensor at ``indices`` of its flattened elements, or of its rows."""

    name: str
    kind: str  # elements or rows
    indices: torch.Tensor
    given_values: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the indices and values that were sent."""
        return self.indices.nbytes + self.given_values.nbytes

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The tensors whose values must be finite."""
        return (self.given_values,)

    def check(self, loader: WeightLoader) -> None:
        """Raises InvalidInputError for indices that are not ascending places of the tensor."""
        shape = loader.shape
        bound = shape[0] if self.kind == "rows" else prod(shape)
        indices = self.indices
        is_ascending = bool((indices[1:] > indices[:-1]).all())
        if len(indices) and not (is_ascending and indices[0] >= 0 and indices[-1] < bound):
            raise InvalidInputError(
                f"named_tensors['{self.name}:{self.kind}']",
                [int(indices.min()), int(indices.max())],
                f"must be ascending, none twice, in [0, {bound})",
            )

    def applied(self, stored: torch.Tensor, loader: WeightLoader) -> torch.Tensor:
        """This rank's slice of the changed tensor. Changes ``stored``, its slice until now."""
        shard = loader.shard
        indices = self.indices.to(stored.device, torch.int64)
        values = self.given_values.to(stored)
        if self.kind == "rows" and shard is not None and shard.where.dim:
            values = shard.where.of(values)
        elif shard is not None:
            indices, is_own = _indices_in_slice(shard.where, loader.shape, indices, self.kind)
            indices, values = indices[is_own], values[is_own]
        if self.kind == "rows":
            stored[indices] = values
            return stored
        stored = stored.contiguous()
        stored.view(-1)[indices] = values
        return stored


Change = TensorChange | LoraChange


def _joined(base: str, kind: str) -> str:
    if kind in (LORA_A, LORA_B):
        return f"{base.removesuffix('weight')}{kind}.weight"
    return f"{base}:{kind}"


class TensorChanges:
    """Puts changes together from the tensors that they come as."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}  # by name, then by kind
        self.last_manifest: Manifest = {}  # what the last whole change came as

    def add(self, name: str, tensor: torch.Tensor, scaling: LoraScaling | None) -> Change | None:
        """The change that is whole with this tensor; None while its other one has not come.

        ``scaling``: of LoRA adapters.
        """
        base_kind = split_name(name)
        assert base_kind is not None
        base, kind = base_kind
        found = self._waiting.pop(base, {})
        if not found:
            self._waiting[base] = {kind: tensor.clone()}  # valid until the next tensor alone
            return None
        found[kind] = tensor
        self.last_manifest = {
            _joined(base, each): TensorSpec.of(tensor) for each, tensor in found.items()
        }
        if found.keys() == {LORA_A, LORA_B}:
            own = scaling.get(base) if isinstance(scaling, Mapping) else scaling
            return LoraChange(base, found[LORA_A], found[LORA_B], own)
        if len(found) != 2 or VALUES not in found:
            raise _unpaired(base, found)
        values = found.pop(VALUES)
        ((kind, indices),) = found.items()
        return TensorChange(base, kind, indices, values)

    def refuse_unpaired(self) -> None:
        """Raises InvalidInputError where something still waits for its other one."""
        for base, found in self._waiting.items():
            raise _unpaired(base, found)


def _indices_in_slice(
    where: TensorSlice, shape: tuple[int, ...], indices: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of a whole tensor as those of its slice, and which of them lie in it."""
    length = shape[where.dim]
    inner = 1 if kind == "rows" else prod(shape[where.dim + 1 :])
    place = torch.full((length,), -1, dtype=torch.int64, device=indices.device)
    slice_len = sum(map(len, where.ranges))
    place[torch.cat([torch.arange(each.start, each.stop) for each in where.ranges])] = torch.arange(
        slice_len, device=indices.device
    )
    along = place[(indices // inner) % length]
    outer = indices // (inner * length)
    return (outer * slice_len + along) * inner + indices % inner, along >= 0
