"""The update that is under way: what has to come, what has been checked, what has been written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import WeightLoader, mismatches, same_values
from rollout.weights.delta import Change, TensorChanges, changed_specs, split_name
from rollout.weights.lora import LoraChange
from rollout.weights.manifest import LISTED, Manifest, TensorSpec, refuse_mismatched
from rollout.weights.source import (
    WeightTensors,
    checked_pair,
    closed_iterator,
    refuse_not_finite,
    spec_of,
)
from rollout.weights.update_options import UpdateOptions
from rollout.weights.versions import TARGET
from rollout.weights.wrapped_names import refuse_wrapped

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class OpenUpdate:
    """One update, and the loaders that it writes to.

    Each of several ranks checks, counts and writes what it stores of a tensor, and no more.
    ``lora_bases``, which outlive the update, are the values of adapted weights without an adapter.
    """

    options: UpdateOptions
    versions: dict[str, int]  # of its parts, once it is committed
    parts: frozenset[str]
    weight_loaders: Mapping[str, WeightLoader]
    is_ignored: Callable[[str], bool]  # a name that none of its parts has: is it a known one?
    last_call: float  # seconds, by the transaction's clock
    manifest: Manifest | None = None  # all that has to come, where that was announced
    source: WeightTensors | None = None  # of an update in one call: what `begin` has checked
    incoming: Manifest | None = None  # of the call that is loaded now, where it is known
    num_loads: int = 0  # calls that brought tensors
    checked: dict[str, TensorSpec] = field(default_factory=dict)  # fit, and may come
    loaded: dict[str, TensorSpec] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)  # names that came for no selected part
    changes: TensorChanges = field(default_factory=TensorChanges)
    lora_bases: dict[str, torch.Tensor] = field(default_factory=dict)  # by name, this rank's
    adapted: set[str] = field(default_factory=set)  # whose adapter has come
    is_loading: bool = False  # whether a write has begun
    num_bytes: int = 0  # written by this rank, in the dtypes they came in

    @property
    def version(self) -> int:
        """The target's, where the update reaches it."""
        return self.versions.get(TARGET, max(self.versions.values()))

    @property
    def progress(self) -> str:
        """The progress of this update, for an error."""
        some = ", ".join(list(self.loaded)[:LISTED]) + ", ..." * (len(self.loaded) > LISTED)
        return f"version {self.version} stopped after {len(self.loaded)} tensors ({some})"

    def announce(self, manifest: Manifest, *, is_direct: bool = False) -> None:
        """All that is going to come. Raises InvalidInputError unless it is what has to."""
        self.manifest = self._wholes(manifest, is_all=True)
        self._refuse_mismatches(self.manifest, partial=self.options.partial)
        if is_direct:
            self._refuse_conversions(self.manifest)
        self.checked.update(self.manifest)

    def check(self, source: WeightTensors) -> None:
        """Check all that is known of tensors before the first of them is written.

        Of an update in one call they are all that is going to come. Raises InvalidInputError.
        """
        self.incoming = source.manifest()
        if self.incoming is not None:
            if self.source is source:
                self.announce(self.incoming, is_direct=source.is_direct)
            else:
                self._check_specs(self.incoming, is_direct=source.is_direct)
            if source.is_stored:
                self._check_values(source, self.incoming)

    def _check_values(self, source: WeightTensors, manifest: Manifest) -> None:
        """Read stored tensors through, for what shapes and dtypes do not say: whether values are
        finite, where they must be, and those of tied tensors and changes."""
        loaders, check_finite = self.weight_loaders, self.options.check_finite
        twins = {name: loader.alias_of for name, loader in loaders.items() if loader.alias_of}
        tied = {name for pair in twins.items() if manifest.keys() >= {*pair} for name in pair}
        if not check_finite and not tied and manifest.keys() <= loaders.keys():
            return
        values: dict[str, torch.Tensor] = {}
        changes = TensorChanges()
        with closed_iterator(source.tensors_to_check()) as tensors:
            for name, tensor in tensors:
                loader = loaders.get(name)
                if loader is None:
                    if self._takes(name):
                        change = changes.add(name, tensor, self.options.lora_scaling)
                        if change is not None:
                            self._check_change(change, check_finite)
                    continue
                if not check_finite and name not in tied:
                    continue
                own = tensor if source.checks_for_all else loader.own(tensor)
                if check_finite:
                    refuse_not_finite(name, own.to(loader.dtype))
                if name in tied:
                    values[name] = own
        for name in tied & twins.keys() & values.keys():
            other = values[twins[name]]
            if values[name] is not other and not same_values(values[name], other):
                raise InvalidInputError(
                    "named_tensors", name, f"differs from {twins[name]}, its tied twin"
                )

    def load(self, source: WeightTensors) -> None:
        """Write what this rank stores of each tensor, of a sharded source without ever having more.

        What was not checked is checked as it comes. Raises InvalidInputError, and what the source
        raises.
        """
        check_finite = self.options.check_finite and not source.is_stored
        manifest = self.incoming
        if manifest is None:
            self._load_unknown(source, check_finite)
            return
        shards = {
            name: loader.shard if (loader := self.weight_loaders.get(name)) else None
            for name in manifest
            if self._takes(name)
        }
        needed = {name: shard.where if shard else None for name, shard in shards.items()}
        with closed_iterator(source.sliced(needed)) as slices:
            for name, values in slices:
                if name not in needed:
                    if name not in manifest:
                        refuse_mismatched([f"not as announced: {name} was not"])
                elif name not in self.weight_loaders:
                    self._take_change(name, values, check_finite)
                else:
                    if not source.is_stored:
                        self._check_slice(name, values)
                    self._write(name, values, check_finite)
                del values  # which would lie beside the next

    def _load_unknown(self, source: WeightTensors, check_finite: bool) -> None:
        with closed_iterator(source) as tensors:
            for pair in tensors:
                name, tensor = checked_pair(pair)
                loader = self.weight_loaders.get(name)
                if loader is None and not self._takes(name):
                    continue
                if loader is None and split_name(name):
                    self._take_change(name, tensor, check_finite)
                    continue
                self._check_specs({name: spec_of(name, tensor)}, is_direct=source.is_direct)
                self._write(name, self.weight_loaders[name].own(tensor), check_finite)

    def check_complete(self) -> None:
        """Raise unless all has come that has to."""
        self.changes.refuse_unpaired()
        renames = self.options.partial and self.options.weight_version is not None
        if not self.is_loading and (self.ignored or not renames):
            raise InvalidInputError(
                "named_tensors", sorted(self.ignored), "an update must bring a tensor to store"
            )
        if self.manifest is None or self.loaded.keys() != self.manifest.keys():
            self._refuse_mismatches(self.loaded, partial=self.options.partial)

    def _takes(self, name: str) -> bool:
        """Whether a tensor of this name is written, or an error; else it is ignored, and counted
        as that."""
        if name in self.weight_loaders:
            return True
        whole, _ = split_name(name) or (name, "")
        if whole in self.weight_loaders or not self.is_ignored(whole):
            return True
        self.ignored.add(whole)
        return False

    def _wholes(self, incoming: Manifest, *, is_all: bool) -> Manifest:
        """The entries that this update takes, with changed tensors in place of what their changes
        come as."""
        if incoming.keys() <= self.weight_loaders.keys():
            return dict(incoming)
        taken = {name: spec for name, spec in incoming.items() if self._takes(name)}
        changed = changed_specs(taken, self.weight_loaders, is_all=is_all)
        whole = {name: spec for name, spec in taken.items() if split_name(name) is None}
        both = changed.keys() & whole.keys()
        both |= {name for name in changed if self._alias_of(name) in changed}
        if both:
            refuse_mismatched([f"comes twice: {name}" for name in sorted(both)])
        if changed and self.options.base_version is None and self.options.lora_scaling is None:
            raise InvalidInputError(
                "base_version", None,
                "changes of tensors need the version they are changes of, adapters lora_scaling",
            )  # fmt: skip
        return whole | changed

    def _alias_of(self, name: str) -> str | None:
        loader = self.weight_loaders.get(name)
        return None if loader is None else loader.alias_of

    def _check_specs(self, incoming: Manifest, *, is_direct: bool) -> None:
        """Raise unless tensors fit the model, were announced (if any were), and come once."""
        incoming = self._wholes(incoming, is_all=False)
        if (
            not self.loaded.keys().isdisjoint(incoming)
            or not incoming.items() <= self.checked.items()
        ):
            self._refuse_mismatches(incoming, partial=True)
            lines = [f"came twice: {name}" for name in incoming if name in self.loaded]
            announced = self.manifest
            if announced is not None:
                lines += [
                    f"not as announced: {name} is {spec}, announced was {announced.get(name)}"
                    for name, spec in incoming.items()
                    if announced.get(name) != spec
                ]
            refuse_mismatched(lines)
            self.checked.update(incoming)
        if is_direct:
            self._refuse_conversions(incoming)

    def _refuse_conversions(self, incoming: Manifest) -> None:
        refuse_mismatched(
            [
                f"wrong dtype: {name} is {spec.dtype}, the model has {loader.dtype} and "
                "load_format='direct' converts nothing"
                for name, spec in incoming.items()
                if spec.dtype is not (loader := self.weight_loaders[name]).dtype
            ]
        )

    def _check_change(self, change: Change, check_finite: bool) -> None:
        loader = self.weight_loaders[change.name]
        change.check(loader)
        for values in change.values:
            spec_of(change.name, values)
            if check_finite:
                refuse_not_finite(change.name, values.to(loader.dtype))

    def _take_change(self, name: str, tensor: torch.Tensor, check_finite: bool) -> None:
        """Write a change when it is whole: of an adapted weight its base plus the adapter."""
        change = self.changes.add(name, tensor, self.options.lora_scaling)
        if change is None:
            return
        self._check_specs(self.changes.last_manifest, is_direct=False)
        self._check_change(change, check_finite)
        loader = self.weight_loaders[change.name]
        own = loader if loader.shard is None else loader.shard.loader
        stored = own.read()
        if isinstance(change, LoraChange):
            if change.name not in self.lora_bases:
                self.lora_bases[change.name] = stored
            stored = self.lora_bases[change.name].clone()
            self.adapted.add(change.name)
        self.is_loading = True
        own.write(change.applied(stored, loader))
        self.loaded[change.name] = self.checked[change.name]
        self.num_bytes += change.num_bytes

    @property
    def restores_bases(self) -> bool:
        """Whether weights without an adapter are written by `settle_bases`, whatever has come."""
        return self.options.lora_scaling is not None and bool(self.lora_bases)

    def settle_bases(self) -> None:
        """After the last write: weights without an adapter now get their base again, and what was
        written otherwise is a base of its own."""
        if self.restores_bases:
            for name in self.lora_bases.keys() - self.loaded.keys() & self.weight_loaders.keys():
                loader = self.weight_loaders[name]
                own = loader if loader.shard is None else loader.shard.loader
                own.write(self.lora_bases.pop(name))
        for name in self.loaded.keys() - self.adapted if self.lora_bases else ():
            loader = self.weight_loaders[name]
            for written in (name, loader.alias_of or name, *loader.parts):
                self.lora_bases.pop(written, None)

    def _check_slice(self, name: str, own: torch.Tensor) -> None:
        """Raise unless this is what the rank needs of a tensor that was checked before."""
        shard, spec = self.weight_loaders[name].shard, self.checked[name]
        shape = spec.shape if shard is None else shard.where.shape_of(spec.shape)
        if spec_of(name, own) != TensorSpec(shape, spec.dtype) or name in self.loaded:
            raise InvalidInputError(
                f"named_tensors[{name!r}]", TensorSpec.of(own),
                f"must be the needed {TensorSpec(shape, spec.dtype)}, and come once",
            )  # fmt: skip

    def _write(self, name: str, own: torch.Tensor, check_finite: bool) -> None:
        loader = self.weight_loaders[name]
        if check_finite:
            refuse_not_finite(name, own.to(loader.dtype))
        self.is_loading = True
        loader.write_own(own)
        self.loaded[name] = self.checked[name]
        self.num_bytes += own.nbytes

    def _refuse_mismatches(self, offered: Manifest, *, partial: bool) -> None:
        """Unknown names, wrong shapes, odd dtypes and, unless partial, missing names."""
        refuse_wrapped(offered, self.weight_loaders)
        shapes = {name: spec.shape for name, spec in offered.items()}
        lines = mismatches(self.weight_loaders, shapes, partial=partial)
        lines += [
            f"wrong dtype: {name} is {spec.dtype}, must be one of float64, float32, float16, "
            "bfloat16"
            for name, spec in offered.items()
            if spec.dtype not in _DTYPES
        ]
        refuse_mismatched(lines)
