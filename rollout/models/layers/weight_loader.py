"""WeightLoader: reads and writes one named tensor of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from rollout.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Indices of a tensor along one dimension: ascending ranges, joined without gaps in the
    slice."""

    dim: int
    ranges: tuple[range, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of a tensor: a view where it is one range, else a copy."""
        views = [whole.narrow(self.dim, each.start, len(each)) for each in self.ranges]
        return views[0] if len(views) == 1 else torch.cat(views, self.dim)

    def shape_of(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The slice's shape, of a tensor of this shape."""
        shape = list(whole)
        shape[self.dim] = sum(map(len, self.ranges))
        return tuple(shape)

    def flat_ranges(self, whole: Sequence[int]) -> list[range]:
        """The slice's elements in order, as ranges of a contiguous tensor of this shape."""
        inner, length = prod(whole[self.dim + 1 :]), whole[self.dim]
        return [
            range((outer * length + each.start) * inner, (outer * length + each.stop) * inner)
            for outer in range(prod(whole[: self.dim]))
            for each in self.ranges
        ]


@dataclass(frozen=True, slots=True)
class Shard:
    """The slice that this rank stores of a tensor split over ranks, and the slice's loader."""

    where: TensorSlice
    loader: WeightLoader


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoader:
    """One named tensor of a model, wherever and however its values are stored.

    ``write`` takes any floating dtype and device, but needs the exact shape: call `mismatches`
    before the first write. ``read`` returns a copy.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    write: Callable[[torch.Tensor], None]
    read: Callable[[], torch.Tensor]
    location: tuple[int, int]  # id() of the object that stores it, and its first row there
    alias_of: str | None = None  # the first name of a tensor with two
    parts: tuple[str, ...] = ()  # tensors that this one fuses, such as experts
    shard: Shard | None = None  # this rank's slice; None: all of the tensor is stored

    @property
    def required(self) -> bool:
        """Whether a full load must name it. Aliases and fused tensors have other names to load."""
        return self.alias_of is None and not self.parts

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The slice of a whole tensor that this rank stores."""
        return whole if self.shard is None else self.shard.where.of(whole)

    def write_own(self, values: torch.Tensor) -> None:
        """Write what `own` returns."""
        (self if self.shard is None else self.shard.loader).write(values)

    def with_write(self, write: Callable[[WeightLoader, torch.Tensor], None]) -> WeightLoader:
        """A loader that writes whole tensors and slices by ``write(self, values)``."""
        shard = self.shard
        if shard is not None:
            shard = replace(shard, loader=shard.loader.with_write(write))
        return replace(self, write=lambda values: write(self, values), shard=shard)

    @staticmethod
    def of(tensor: torch.Tensor, location: tuple[int, int] | None = None) -> WeightLoader:
        """A loader of a plain tensor, written in place. ``location``: needed if it is a view."""
        return WeightLoader(
            location=location or (id(tensor), 0),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            write=lambda values: fill(tensor, values),
            read=tensor.clone,
        )

    def reordered(self, order_O: torch.Tensor) -> WeightLoader:
        """A loader for checkpoints whose rows are in another order than the stored ones.

        ``order_O``: stored row i is the checkpoint's row order[i].
        """
        inverse_O = torch.argsort(order_O)
        return replace(
            self,
            write=lambda values: self.write(values[order_O.to(values.device)]),
            read=lambda: (stored := self.read())[inverse_O.to(stored.device)],
            shard=None,  # its rows may lie anywhere
        )


@torch.inference_mode()
def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy in place, converting dtype and device. Inference mode allows any tensor as target."""
    assert values.shape == target.shape, f"{tuple(values.shape)} into {tuple(target.shape)}"
    target.copy_(values)


def same_values(values: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether ``values``, converted to the stored dtype, equal ``stored``; NaN equals NaN."""
    converted = values.to(stored)
    return bool(((converted == stored) | (converted.isnan() & stored.isnan())).all())


def with_alias(
    name: str, alias: str, loader: WeightLoader, remedy: str = "send one of them"
) -> dict[str, WeightLoader]:
    """Loaders of one tensor with two names, such as tied embedding and head.

    The name written first fills the tensor. Writing the other one must bring the same values, else
    it raises CheckpointError. Only the returned pair remembers what was written.
    """
    written_as: list[str] = []

    def named(which: str, alias_of: str | None) -> WeightLoader:
        def write(stored: WeightLoader, values: torch.Tensor) -> None:
            if which in written_as or not written_as:
                written_as.append(which)
                stored.write(values)
                return
            if not same_values(values, stored.read()):
                raise CheckpointError(
                    f"{name} and {alias} are one tensor but differ in value; {remedy}"
                )

        return replace(loader.with_write(write), alias_of=alias_of)

    return {name: named(name, None), alias: named(alias, name)}


def fused_rows(parts: Mapping[str, WeightLoader]) -> WeightLoader:
    """A loader of a tensor that holds the rows of others, one after another.

    ``parts``: loaders by name, of tensors that differ in their number of rows alone.
    """
    loaders = list(parts.values())
    counts = [loader.shape[0] for loader in loaders]

    def write(values: torch.Tensor) -> None:
        for loader, own in zip(loaders, values.split(counts), strict=True):
            loader.write(own)

    return replace(
        loaders[0],
        shape=(sum(counts), *loaders[0].shape[1:]),
        write=write,
        read=lambda: torch.cat([loader.read() for loader in loaders]),
        parts=tuple(parts),
        shard=None,  # made of several shards
    )


def mismatches(
    weight_loaders: Mapping[str, WeightLoader],
    offered: Mapping[str, Sequence[int]],
    *,
    partial: bool = False,
) -> list[str]:
    """The reasons why ``offered`` (name to shape) cannot be loaded, one line per tensor.

    Empty if it can. ``partial`` allows missing names. A fused tensor and its parts exclude each
    other.
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
