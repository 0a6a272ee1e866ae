"""The update that is under way: what has to come, what has been checked, what has been written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import WeightLoader, mismatches, same_values
from rollout.weights.delta import Change, TensorChanges, changed_specs, split_name
from rollout.weights.lora import LoraChange
from rollout.weights.manifest import LISTED, Manifest, Slices, TensorSpec, refuse_mismatched
from rollout.weights.named_tensors import (
    NamedTensors,
    SlicedSource,
    StoredWeights,
    checked_pair,
    closed_iterator,
    refuse_not_finite,
    refuse_unreadable,
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
    passes_over: Callable[[str], bool]
    last_call: float  # seconds, by the transaction's clock
    manifest: Manifest | None = None
    source: NamedTensors | None = None  # of an update in one call: what `begin` has checked
    num_loads: int = 0  # calls that brought tensors
    checked: dict[str, TensorSpec] = field(default_factory=dict)  # fit, and may come
    loaded: dict[str, TensorSpec] = field(default_factory=dict)
    passed_over: set[str] = field(default_factory=set)  # names that came for no selected part
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
    def ignored(self) -> set[str]:
        """Names of tensors that came and changed nothing: passed over, or another part's, with
        which they were compared."""
        return self.passed_over | {
            name for name in self.loaded if self.weight_loaders[name].is_borrowed
        }

    @property
    def progress(self) -> str:
        """The progress of this update, for an error."""
        some = ", ".join(list(self.loaded)[:LISTED]) + ", ..." * (len(self.loaded) > LISTED)
        return f"version {self.version} stopped after {len(self.loaded)} tensors ({some})"

    def takes(self, name: str) -> bool:
        """Whether what comes under this name is written, or an error; else it is ignored, and
        noted as passed over."""
        name, _ = split_name(name) or (name, "")
        if name in self.weight_loaders or not self.passes_over(name):
            return True
        self.passed_over.add(name)
        return False

    def taken(self, manifest: Manifest) -> Manifest:
        """The entries of a manifest that this update takes."""
        return {name: spec for name, spec in manifest.items() if self.takes(name)}

    def announce(self, manifest: Manifest) -> None:
        """All that is going to come. Raises InvalidInputError unless it is what has to."""
        self.manifest = self._wholes(self.taken(manifest), is_all=True)
        self.checked.update(self.manifest)
        self._refuse_mismatches(self.manifest, partial=self.options.partial)

    def check(self, incoming: Manifest, direct: bool) -> None:
        """Raise unless tensors fit the model, were announced (if any were), and come once.

        ``direct``: they are written unconverted, so they must have the model's dtype.
        """
        incoming = self._wholes(incoming, is_all=False)
        unchecked = {
            name: spec
            for name, spec in incoming.items()
            if self.checked.get(name) != spec or name in self.loaded
        }
        if unchecked:
            self._refuse_unchecked(unchecked)
        if direct:
            refuse_mismatched(
                [
                    f"wrong dtype: {name} is {spec.dtype}, the model has {loader.dtype} and "
                    "load_format='direct' converts nothing"
                    for name, spec in incoming.items()
                    if spec.dtype is not (loader := self.weight_loaders[name]).dtype
                ]
            )
        self.checked.update(incoming)

    def check_complete(self) -> None:
        """Raise unless all has come that has to."""
        self.changes.refuse_unpaired()
        if not self.is_loading:
            raise InvalidInputError(
                "named_tensors", sorted(self.passed_over), "an update must bring a tensor to store"
            )
        self._refuse_mismatches(self.loaded, partial=self.options.partial)

    def check_source(self, source: NamedTensors, manifest: Manifest | None, direct: bool) -> None:
        """Check what is known of tensors before the first of them is written."""
        if manifest is not None:
            self.check(self.taken(manifest), direct)
        if isinstance(source, StoredWeights):
            self.check_values(source.unchecked(), for_all=source.checks_for_all)
        elif _is_stored(source):
            self.check_values(source)

    def check_values(self, named_tensors: NamedTensors, *, for_all: bool = False) -> None:
        """Read tensors through that are all there, for what shapes and dtypes do not say.

        ``for_all``: what other ranks need of them too.
        """
        loaders = self.weight_loaders
        tied = {name for name, loader in loaders.items() if loader.alias_of is not None}
        tied |= {loaders[name].alias_of or name for name in tied}
        twins: dict[str, torch.Tensor] = {}
        changes = TensorChanges()
        with closed_iterator(named_tensors) as tensors:
            for name, tensor in tensors:
                if not self.takes(name):
                    continue
                if split_name(name):
                    change = changes.add(name, tensor, self.options.lora_scaling)
                    if change is not None:
                        self._check_change(change, self.options.check_finite)
                    continue
                own = loaders[name].own(tensor)
                if loaders[name].is_borrowed:
                    loaders[name].write_own(own)  # which compares
                checked = tensor if for_all else own
                if self.options.check_finite:
                    refuse_not_finite(name, checked.to(loaders[name].dtype))
                if name in tied:
                    twins[name] = checked
        for name, values in twins.items():
            other = twins.get(loaders[name].alias_of or name)
            if other is not None and other is not values and not same_values(values, other):
                raise InvalidInputError(
                    "named_tensors", name, f"differs from {loaders[name].alias_of}, its tied twin"
                )

    def load(self, source: NamedTensors, manifest: Manifest | None, direct: bool) -> None:
        """Write what this rank stores of each tensor, of a `SlicedSource` without ever having more.

        What streams is checked as it comes. Raises InvalidInputError, and what the source raises.
        """
        check_finite = self.options.check_finite and not _is_stored(source)
        if manifest is not None and isinstance(source, SlicedSource):
            offered = self.taken(source.manifest())
            loaders = {name: self.weight_loaders.get(name) for name in offered}
            shards = {name: each.shard if each else None for name, each in loaders.items()}
            slices = {name: shard.where if shard else None for name, shard in shards.items()}
            self._load_slices(source, slices, check_finite)
            return
        with closed_iterator(source) as tensors:
            for pair in tensors:
                name, tensor = checked_pair(pair)
                if not self.takes(name):
                    continue
                if split_name(name):
                    self._take_change(name, tensor, check_finite)
                else:
                    self._check_whole(name, tensor, direct)
                    self._write(name, self.weight_loaders[name].own(tensor), check_finite)

    def _load_slices(self, source: SlicedSource, needed: Slices, check_finite: bool) -> None:
        with closed_iterator(source.sliced(needed)) as slices:
            for name, values in slices:
                if name in needed and split_name(name):
                    self._take_change(name, values, check_finite)
                elif name in needed:
                    self._check_slice(name, values)
                    self._write(name, values, check_finite)
                del values  # which would lie beside the next

    def _wholes(self, incoming: Manifest, *, is_all: bool) -> Manifest:
        """The manifest with changed tensors in place of what their changes come as."""
        changed = changed_specs(incoming, self.weight_loaders, is_all=is_all)
        whole = {name: spec for name, spec in incoming.items() if split_name(name) is None}
        both = changed.keys() & whole.keys()
        both |= {name for name in changed if self._loader_alias(name) in changed}
        if both:
            refuse_mismatched([f"comes twice: {name}" for name in sorted(both)])
        if changed and self.options.base_version is None and self.options.lora_scaling is None:
            raise InvalidInputError(
                "base_version", None,
                "changes of tensors need the version they are changes of, adapters lora_scaling",
            )  # fmt: skip
        return whole | changed

    def _loader_alias(self, name: str) -> str | None:
        loader = self.weight_loaders.get(name)
        return None if loader is None else loader.alias_of

    def _check_change(self, change: Change, check_finite: bool) -> None:
        loader = self.weight_loaders.get(change.name)
        if loader is None:
            refuse_mismatched([f"unexpected: {change.name}"])
            return
        change.check(loader)
        for values in change.values:
            refuse_unreadable(change.name, values)
            if check_finite:
                refuse_not_finite(change.name, values.to(loader.dtype))

    def _take_change(self, name: str, tensor: torch.Tensor, check_finite: bool) -> None:
        """Write a change when it is whole: of an adapted weight its base plus the adapter."""
        change = self.changes.add(name, tensor, self.options.lora_scaling)
        if change is None:
            return
        self.check(self.changes.last_manifest, direct=False)
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
        if self.options.lora_scaling is not None:
            for name in self.lora_bases.keys() - self.loaded.keys() & self.weight_loaders.keys():
                loader = self.weight_loaders[name]
                own = loader if loader.shard is None else loader.shard.loader
                own.write(self.lora_bases.pop(name))
        for name in self.loaded.keys() - self.adapted:
            loader = self.weight_loaders[name]
            for written in (name, loader.alias_of or name, *loader.parts):
                self.lora_bases.pop(written, None)

    def _check_whole(self, name: str, tensor: torch.Tensor, direct: bool) -> None:
        refuse_unreadable(name, tensor)
        spec = TensorSpec.of(tensor)
        if direct or self.checked.get(name) != spec or name in self.loaded:
            self.check({name: spec}, direct)

    def _check_slice(self, name: str, own: torch.Tensor) -> None:
        """Raise unless this is what the rank needs of a tensor that `check` has let pass."""
        shard, spec = self.weight_loaders[name].shard, self.checked[name]
        shape = spec.shape if shard is None else shard.where.shape_of(spec.shape)
        if TensorSpec.of(own) != TensorSpec(shape, spec.dtype) or name in self.loaded:
            raise InvalidInputError(
                f"named_tensors[{name!r}]", TensorSpec.of(own),
                f"must be the needed {TensorSpec(shape, spec.dtype)}, and come once",
            )  # fmt: skip

    def _write(self, name: str, own: torch.Tensor, check_finite: bool) -> None:
        if check_finite:
            refuse_not_finite(name, own.to(self.weight_loaders[name].dtype))
        self.is_loading = True
        self.weight_loaders[name].write_own(own)
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

    def _refuse_unchecked(self, incoming: Manifest) -> None:
        self._refuse_mismatches(incoming, partial=True)
        announced = self.manifest
        lines = [f"came twice: {name}" for name in incoming if name in self.loaded]
        if announced is not None:
            lines += [
                f"not as announced: {name} is {spec}, announced was {announced.get(name)}"
                for name, spec in incoming.items()
                if announced.get(name) != spec
            ]
        refuse_mismatched(lines)


def _is_stored(source: NamedTensors) -> bool:
    """Whether all tensors are there before the first is written."""
    return isinstance(source, Collection | StoredWeights)
