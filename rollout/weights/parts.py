"""The models of one worker that weights are sent to, target and drafts, and what they share."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from rollout.errors import InvalidInputError
from rollout.models.layers.weight_loader import WeightLoader
from rollout.weights.checkpoint_source import CheckpointSource
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import WeightTensors
from rollout.weights.update_counts import NO_PART


class WeightPart(Protocol):
    """A model that weights are written to."""

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. Ask anew for each update: tied names remember which of them
        was written."""
        ...

    def finish_loading(self) -> None:
        """Called when the writes of an update are done."""
        ...

    def release(self) -> int:
        """Free the memory of every tensor; the bytes freed. 0 for what another part freed.

        Nothing is read, written or run until ``allocate``.
        """
        ...

    def allocate(self) -> None: ...


FolderReader = Callable[[Path, frozenset[str]], WeightTensors]
"""Opens a folder that drafts are kept in: the tensors of the named parts, by the names updates use.
"""

_DRAFT_STEP = re.compile(r"draft_step_\d+")


class WeightParts(Mapping[str, WeightPart]):
    """Models by the names selectors use, owners before borrowers: the target comes first.

    A checkpoint name that several parts have is one tensor in one place, as a draft's embedding may
    be the target's. It belongs to the first of them: the others follow it and never change it.

    Selectors:

    - ``all``: every part that is not frozen.
    - a part's own name: that part, frozen or not.
    - ``draft``, of a chain: every ``draft_step_<i>``.
    """

    def __init__(self, parts: Mapping[str, WeightPart]) -> None:
        """Raises what `add` does."""
        self._parts: dict[str, WeightPart] = {}
        self._owners: dict[str, str] = {}  # checkpoint name -> part
        self._storage_of: dict[str, tuple[int, int]] = {}
        self._frozen: set[str] = set()
        self._readers: dict[str, FolderReader] = {}
        for part, model in parts.items():
            self.add(part, model)

    def add(
        self,
        part: str,
        model: WeightPart,
        *,
        frozen: bool = False,
        reader: FolderReader | None = None,
    ) -> None:
        """A draft of the worker whose target is here already.

        Args:
            frozen: whoever streams weights to ``all`` does not train it: it is left alone by them,
                and its values outlast a release of memory that keeps no others.
            reader: for updates of drafts alone; steps of a chain have one in common. Default: all
                that the folder holds.

        Raises InvalidInputError for a name under which another part keeps a tensor of its own.
        """
        weight_loaders = model.weight_loaders()
        for name, loader in weight_loaders.items():
            if self._storage_of.get(name, loader.location) != loader.location:
                raise InvalidInputError(
                    "parts", f"{self._owners[name]}, {part}",
                    f"both have a {name} of their own: name the latter's otherwise",
                )  # fmt: skip
        for name, loader in weight_loaders.items():
            self._owners.setdefault(name, part)
            self._storage_of.setdefault(name, loader.location)
        self._parts[part] = model
        self._readers[part] = reader or (lambda folder, parts: CheckpointSource(folder))
        if frozen:
            self._frozen.add(part)

    def __getitem__(self, part: str) -> WeightPart:
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def frozen(self) -> frozenset[str]:
        """The parts that the selector ``all`` leaves alone."""
        return frozenset(self._frozen)

    def selected(self, selector: str) -> frozenset[str]:
        """Parts to update. Raises InvalidInputError for an unknown one, listing those there are."""
        if not isinstance(selector, str):
            raise InvalidInputError("selector", selector, "must be all or the name of a part")
        if selector == "all":
            return frozenset(self) - self._frozen
        steps = frozenset(part for part in self if _DRAFT_STEP.fullmatch(part))
        if selector in self:
            return frozenset([selector])
        if selector == "draft" and steps:
            return steps
        known = ", ".join(["all", *sorted({*self, "draft"} if steps else self)])
        raise InvalidInputError("selector", selector, f"this worker has: {known}")

    def source(self, folder: Path, selector: str) -> WeightTensors:
        """The source of an update from a folder to these parts. Raises CheckpointError."""
        parts = self.selected(selector)
        first = next(part for part in self if part in parts)  # the target, where it is among them
        return self._readers[first](folder, parts)

    def tied(self, names: Iterable[str]) -> list[str]:
        """Those of the names whose tensor has another name too."""
        loaders = self.weight_loaders(frozenset(self))
        ties = {name: loader.alias_of for name, loader in loaders.items() if loader.alias_of}
        both = ties.keys() | set(ties.values())
        return [name for name in names if name in both]

    def weight_loaders(self, parts: frozenset[str]) -> dict[str, WeightLoader]:
        """The loaders that an update of these parts writes to: of the tensors they own."""
        return {
            name: loader
            for part, model in self._parts.items()
            if part in parts
            for name, loader in model.weight_loaders().items()
            if self._owners[name] == part
        }

    def stored(self, parts: frozenset[str]) -> dict[str, WeightLoader]:
        """One loader of what this rank stores of each tensor that these parts own, although tied
        names and borrowing parts have several."""
        return {
            name: each if each.shard is None else each.shard.loader
            for name, each in self.weight_loaders(parts).items()
            if each.required
        }

    def has(self, name: str) -> bool:
        """Whether a part has a tensor of this name."""
        return name in self._owners

    def manifest(self, selector: str) -> Manifest:
        """The manifest of a full update of these parts, in the dtypes they are stored in."""
        return {
            name: TensorSpec(loader.shape, loader.dtype)
            for name, loader in self.weight_loaders(self.selected(selector)).items()
            if loader.required
        }

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of tensors, one at a time. Raises InvalidInputError for an unknown name."""
        weight_loaders = self.weight_loaders(frozenset(self))
        for name in names:
            if name not in weight_loaders:
                raise InvalidInputError("name", name, "is no tensor of this model")
            yield name, weight_loaders[name].read()

    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """The number of these tensors that each part owns."""
        return dict(sorted(Counter(self._owners.get(name, NO_PART) for name in names).items()))

    def lenders(self, parts: frozenset[str]) -> frozenset[str]:
        """Other parts that own tensors which these parts borrow."""
        owners = (self._owners[name] for part in parts for name in self[part].weight_loaders())
        return frozenset(owners) - parts

    def digest(self, selector: str) -> str:
        """SHA-256 over the names, dtypes, shapes and bytes of every tensor, in hexadecimal.

        With ``all`` every part is included, frozen ones too.
        """
        digest = hashlib.sha256()
        parts = self.selected(selector)
        for part in sorted(self if selector == "all" else parts):
            for name, loader in sorted(self[part].weight_loaders().items()):
                if loader.required:
                    digest.update(f"{part} {name} {loader.dtype} {loader.shape}".encode())
                    values = loader.read().contiguous().cpu().reshape(-1)
                    digest.update(values.view(torch.uint8).numpy().data)
        return digest.hexdigest()
