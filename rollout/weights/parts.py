"""The models of one worker that weights are sent to, and what they share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from rollout.errors import InvalidInputError
from rollout.layers.destination import Destination, same_values
from rollout.weights.part import WeightPart


class WeightParts(Mapping[str, WeightPart]):
    """Models by the names selectors use, owners before borrowers: the target comes first.

    A checkpoint name that several parts have is one tensor in one place, as a draft's embedding may
    be the target's. It belongs to the first of them: the others follow it and never change it.
    """

    def __init__(self, parts: Mapping[str, WeightPart]) -> None:
        """Raises what `add` does."""
        self._parts: dict[str, WeightPart] = {}
        self._owners: dict[str, str] = {}  # checkpoint name -> part
        self._places: dict[str, tuple[int, int]] = {}
        for part, model in parts.items():
            self.add(part, model)

    def add(self, part: str, model: WeightPart) -> None:
        """A draft of the worker whose target is here already.

        Raises InvalidInputError for a name under which another part keeps a tensor of its own.
        """
        destinations = model.destinations()
        for name, destination in destinations.items():
            if self._places.get(name, destination.place) != destination.place:
                raise InvalidInputError(
                    "parts", f"{self._owners[name]}, {part}",
                    f"both have a {name} of their own: name the latter's otherwise",
                )  # fmt: skip
        for name, destination in destinations.items():
            self._owners.setdefault(name, part)
            self._places.setdefault(name, destination.place)
        self._parts[part] = model

    def __getitem__(self, part: str) -> WeightPart:
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def selected(self, selector: str) -> frozenset[str]:
        """Raises InvalidInputError for an unknown one, listing those there are."""
        if selector == "all":
            return frozenset(self)
        if selector not in self:
            known = ", ".join(["all", *sorted(self)])
            raise InvalidInputError("selector", selector, f"this worker has: {known}")
        return frozenset([selector])

    def destinations(self, parts: frozenset[str]) -> dict[str, Destination]:
        """Where an update of these parts goes. What they borrow from others may come, unchanged."""
        found: dict[str, Destination] = {}
        for part, model in self._parts.items():
            if part not in parts:
                continue
            for name, destination in model.destinations().items():
                owner = self._owners[name]
                if owner == part:
                    found[name] = destination
                elif owner not in parts:
                    found[name] = _borrowed(name, owner, destination)
        return found

    def digest(self, selector: str) -> str:
        """SHA-256 over the names, dtypes, shapes and bytes of every tensor, in hexadecimal."""
        digest = hashlib.sha256()
        for part in sorted(self.selected(selector)):
            for name, destination in sorted(self[part].destinations().items()):
                if destination.required:
                    digest.update(f"{part} {name} {destination.dtype} {destination.shape}".encode())
                    values = destination.read().contiguous().cpu().reshape(-1)
                    digest.update(values.view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _borrowed(name: str, owner: str, destination: Destination) -> Destination:
    def compare(values: torch.Tensor) -> None:
        if not same_values(values, destination.read()):
            raise InvalidInputError(
                f"named_tensors[{name!r}]", "other values",
                f"is the {owner}'s, which this selector leaves alone: leave it out",
            )  # fmt: skip

    return replace(destination, write=compare, is_borrowed=True)
