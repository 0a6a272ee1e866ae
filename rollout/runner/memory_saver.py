"""Release and resume of a worker's memory: weights, KV cache and graphs."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rollout.errors import EngineStateError, WeightUpdateError
from rollout.memory.sizing import free_bytes
from rollout.runner.graphs.graph_runner import GraphRunner
from rollout.runner.memory_regions import MemoryRegions
from rollout.types import MemoryTag
from rollout.weights.parts import WeightParts
from rollout.weights.transaction import WeightTransaction

log = logging.getLogger(__name__)

_NEEDED = (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
"""The memory without which nothing runs. Without graphs steps are launched kernel by kernel."""


class MemoryPool(Protocol):
    """Memory that comes and goes: a model's weights, keys and values, recurrent states."""

    def release(self) -> int:
        """The bytes freed. Only ``allocate`` may come next."""
        ...

    def allocate(self) -> None:
        """Allocate the memory again. Nothing of what it held remains."""
        ...


@dataclass(frozen=True, slots=True)
class ReleaseMemory:
    """Rank 0's message to the ranks that run the same rows; see `MemorySaver.release`."""

    tags: Collection[MemoryTag]
    keep_weights: bool


@dataclass(frozen=True, slots=True)
class ResumeMemory:
    """Rank 0's message to the ranks that run the same rows; see `MemorySaver.resume`."""

    tags: Collection[MemoryTag]


class MemorySaver:
    """The memory of every model a worker runs, target and drafts alike, by tag.

    The caller ensures that no request has KV when the KV cache is released.
    """

    def __init__(
        self,
        weights: WeightTransaction,
        kv_pools: Sequence[MemoryPool],
        *,
        graphs: GraphRunner | None = None,
        host_pools: Sequence[MemoryPool] = (),
        regions: MemoryRegions | None = None,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            kv_pools: of the target, its states too, and of every draft that has one.
            graphs: of the target.
            host_pools: memory of the host that comes and goes with the KV cache.
            regions: that weights and pools were made in; default: none.
            device: a GPU whose free memory is measured and logged.
        """
        self._weights = weights
        self._kv_pools = list(kv_pools)
        self._graphs = [] if graphs is None else [graphs]
        self._host_pools = host_pools
        self.regions = regions or MemoryRegions()
        self._device = device
        self._backup: WeightBackup | None = None
        self._pinned: dict[str, torch.Tensor] = {}  # kept: to pin memory takes as long as to copy
        self.released: frozenset[MemoryTag] = frozenset()

    def add_kv_pool(self, pool: MemoryPool) -> None:
        """Add the pool of a draft, which is made after the target's."""
        self._kv_pools.append(pool)

    def add_graphs(self, graphs: GraphRunner) -> None:
        """Add the graphs of a draft, which are made after the target's."""
        self._graphs.append(graphs)

    @property
    def unavailable_reason(self) -> str:
        """Why nothing can run: memory that is released and needed; empty when there is none."""
        if not self.released:
            return ""
        missing = [tag.value for tag in _NEEDED if tag in self.released]
        if not missing:
            return ""
        return f"memory is released: call resume_memory({missing}) first"

    def require_held(self, tags: Collection[MemoryTag]) -> None:
        """Raises EngineStateError for a tag that is released, WeightUpdateError for weights that
        are being updated."""
        for tag in tags:
            if tag in self.released:
                raise EngineStateError(
                    f"{tag.value} is released already: call resume_memory({[tag.value]}) first"
                )
        if MemoryTag.WEIGHTS in tags and self._weights.is_under_way:
            raise WeightUpdateError("a weight update is under way; end or abandon it first")

    def require_released(self, tags: Collection[MemoryTag]) -> None:
        """Raises EngineStateError for a tag that is not released."""
        for tag in tags:
            if tag not in self.released:
                raise EngineStateError(f"{tag.value} is not released: there is nothing to resume")

    def release(self, tags: Collection[MemoryTag], keep_weights: bool) -> dict[MemoryTag, int]:
        """Give back what the tags name; the bytes freed by tag.

        ``keep_weights``: their values are set aside and `resume` brings them back; else they are
        lost, except those of frozen parts, which no trainer sends. Raises what
        `require_held` raises; then nothing was released.

        Unless regions preserve addresses, graphs are dropped with any memory: they hold its
        addresses. Without their own tag they are captured again by themselves, with it not before
        `resume`.
        """
        self.require_held(tags)
        freed = dict.fromkeys(tags, 0)
        before = self._free_bytes()
        if MemoryTag.WEIGHTS in tags:
            parts = self._weights.parts
            names = frozenset(parts) if keep_weights else parts.frozen
            self._backup = WeightBackup(parts, names, self._pinned) if names else None
        if MemoryTag.GRAPHS in tags or not self.regions.preserve_addresses:
            for graphs in self._graphs:
                dropped = graphs.drop()
                if MemoryTag.GRAPHS in tags:
                    graphs.is_paused = True
                    freed[MemoryTag.GRAPHS] += dropped
        if MemoryTag.WEIGHTS in tags:
            self._weights.is_resident = False
            freed[MemoryTag.WEIGHTS] = self._release(
                MemoryTag.WEIGHTS, self._weights.parts.values()
            )
        if MemoryTag.KV_CACHE in tags:
            freed[MemoryTag.KV_CACHE] = self._release(MemoryTag.KV_CACHE, self._kv_pools)
            freed[MemoryTag.KV_CACHE] += sum(pool.release() for pool in self._host_pools)
        self.released |= frozenset(tags)
        _return_freed_memory()
        if (after := self._free_bytes()) is not None and before is not None:
            log.info(
                "released %s: %d MiB more are free on %s, %d MiB in all",
                ", ".join(tags),
                (after - before) >> 20,
                self._device,
                after >> 20,
            )
        return freed

    def _release(self, tag: MemoryTag, owners: Iterable[MemoryPool]) -> int:
        """Give back what a tag's owners hold. Returns the bytes; of a region those that the device
        has more for everybody."""
        if not self.regions.preserve_addresses:
            return sum(owner.release() for owner in owners)
        before = self._free_bytes()
        self.regions.pause(tag)
        after = self._free_bytes()
        return 0 if before is None or after is None else max(0, after - before)

    def _allocate(self, tag: MemoryTag, owners: Iterable[MemoryPool]) -> None:
        if self.regions.preserve_addresses:
            self.regions.resume(tag)
        else:
            for owner in owners:
                owner.allocate()

    def resume(self, tags: Collection[MemoryTag]) -> None:
        """Allocate again what the tags name. The KV cache comes back empty.

        Weights come back bitwise, or, where they were not kept, torn: only a full update makes them
        serve. Raises EngineStateError for a tag that is not released. When memory is short, what
        could not be had is still released.
        """
        self.require_released(tags)
        for tag in tags:
            if tag is MemoryTag.WEIGHTS:
                self._resume_weights()
            elif tag is MemoryTag.KV_CACHE:
                self._allocate(tag, self._kv_pools)
                for pool in self._host_pools:
                    pool.allocate()
            else:
                for graphs in self._graphs:
                    graphs.is_paused = False
            self.released -= {tag}

    def _resume_weights(self) -> None:
        weights, parts = self._weights, self._weights.parts
        self._allocate(MemoryTag.WEIGHTS, parts.values())
        weights.is_resident = True
        backup, self._backup = self._backup, None
        if lost := frozenset(parts) - (backup.names if backup else frozenset()):
            weights.tear(lost, "the weights were released without a copy")
        if backup is not None:
            backup.write_back(parts)

    def _free_bytes(self) -> int | None:
        if self._device is None or self._device.type != "cuda":
            return None
        return free_bytes(self._device)


class WeightBackup:
    """A bitwise copy in host memory of every tensor that some parts own. Each of several ranks
    copies what it stores."""

    def __init__(
        self, parts: WeightParts, names: frozenset[str], pinned: dict[str, torch.Tensor]
    ) -> None:
        """``pinned``: host memory for tensors of a GPU, by name; what is missing is added."""
        self.names = names
        loaders = parts.stored(names)
        self._values = {
            name: _copied(name, loader.read(), pinned) for name, loader in loaders.items()
        }
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies have come

    def write_back(self, parts: WeightParts) -> None:
        """Write the copies back to the same parts, whose memory has been allocated again."""
        loaders = parts.stored(self.names)
        for name, values in self._values.items():
            loaders[name].write(values)
        for part in sorted(self.names):
            parts[part].finish_loading()


def _copied(name: str, values: torch.Tensor, pinned: dict[str, torch.Tensor]) -> torch.Tensor:
    if not values.is_cuda:
        return values.clone()
    if name not in pinned:
        pinned[name] = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    return pinned[name].copy_(values, non_blocking=True)


def _return_freed_memory() -> None:
    """Return freed pages to the operating system, and cached blocks to other users of the GPU.

    Allocators retain freed memory: glibc all but the largest blocks, torch's CUDA allocator all of
    it.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
