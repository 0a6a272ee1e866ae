"""WeightLoader: where one tensor of a checkpoint, or of a trainer, goes in a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rollout.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoader:
    """One named tensor of a model, wherever its values really live.

    ``write`` takes any floating dtype and any device and needs the exact shape: callers ask
    ``mismatches`` before the first byte moves. ``read`` gives a copy.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    write: Callable[[torch.Tensor], None]
    read: Callable[[], torch.Tensor]
    place: tuple[int, int]  # the object that holds it, by id(), and its first row there
    alias_of: str | None = None  # this is a second name of that tensor
    is_borrowed: bool = False  # another model's: writing checks that the values are those it has
    parts: tuple[str, ...] = ()  # this is all of those tensors in one, as fused experts are

    @property
    def required(self) -> bool:
        """Whether a full load must name it; one name of a tied pair is enough, parts or whole."""
        return self.alias_of is None and not self.is_borrowed and not self.parts

    @staticmethod
    def of(tensor: torch.Tensor, place: tuple[int, int] | None = None) -> WeightLoader:
        """A plain tensor, written in place; ``place`` where it is a view of what is kept."""
        return WeightLoader(
            place=place or (id(tensor), 0),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            write=lambda values: fill(tensor, values),
            read=tensor.clone,
        )

    def reordered(self, order_O: torch.Tensor) -> WeightLoader:
        """The loader of a tensor whose rows are kept in another order than checkpoints have.

        ``order_O``: kept row i is row order[i] of the tensor.
        """
        place_O = torch.argsort(order_O)
        return replace(
            self,
            write=lambda values: self.write(values[order_O.to(values.device)]),
            read=lambda: (kept := self.read())[place_O.to(kept.device)],
        )


@torch.inference_mode()
def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy in place, converting dtype and device. Inference mode lets any tensor be the target."""
    assert values.shape == target.shape, f"{tuple(values.shape)} into {tuple(target.shape)}"
    target.copy_(values)


def same_values(values: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether ``values`` are what is held, once converted; NaN equals NaN."""
    converted = values.to(held)
    return bool(((converted == held) | (converted.isnan() & held.isnan())).all())


def with_alias(
    name: str, alias: str, loader: WeightLoader, remedy: str = "send one of them"
) -> dict[str, WeightLoader]:
    """Two names of one tensor, as tied embedding and head are.

    Whichever is written first fills it; the other must then carry the same values, and raises
    CheckpointError where it does not. What was written is remembered by the returned pair only.
    """
    written_as: list[str] = []

    def write(name_written: str, values: torch.Tensor) -> None:
        if name_written in written_as or not written_as:
            written_as.append(name_written)
            loader.write(values)
            return
        if not same_values(values, loader.read()):
            raise CheckpointError(
                f"{name} and {alias} are one tensor but differ in value; {remedy}"
            )

    def named(which: str, alias_of: str | None) -> WeightLoader:
        return replace(loader, write=lambda values: write(which, values), alias_of=alias_of)

    return {name: named(name, None), alias: named(alias, name)}


def mismatches(
    weight_loaders: Mapping[str, WeightLoader],
    offered: Mapping[str, Sequence[int]],
    *,
    partial: bool = False,
) -> list[str]:
    """The reasons why ``offered`` (name to shape) cannot be loaded: one line per tensor.

    Empty when all is well. ``partial`` lets names be missing. Of parts and their whole one comes.
    """
    lines = [f"unexpected: {name}" for name in offered if name not in weight_loaders]
    for name, shape in offered.items():
        wanted = weight_loaders[name].shape if name in weight_loaders else tuple(shape)
        if tuple(shape) != wanted:
            lines.append(f"wrong shape: {name} is {list(shape)}, the model has {list(wanted)}")
    canonical = {
        weight_loaders[name].alias_of or name for name in offered if name in weight_loaders
    }
    lines += [
        f"comes twice: {name} holds {part} too"
        for name in sorted(canonical)
        for part in weight_loaders[name].parts
        if part in canonical
    ]
    if not partial:
        filled = {part for name in canonical for part in weight_loaders[name].parts or (name,)}
        lines += [
            f"missing: {name}"
            for name, loader in weight_loaders.items()
            if loader.required and name not in filled
        ]
    return lines
