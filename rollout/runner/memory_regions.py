"""Memory of a GPU that sleep gives back and takes again at the same addresses, so that CUDA graphs
survive. It takes the package torch-memory-saver, and is used where that is installed.

This has never been run on a GPU: what the package does was read.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import count
from typing import Any, Self

import torch

from rollout.ops import gpu
from rollout.types import MemoryTag

log = logging.getLogger(__name__)

_numbers = count()


class MemoryRegions:
    """Regions of a device's memory by tag. Without the package, or on a CPU, memory that is
    allocated in a region is like any other.

    ``saver``: the package's `torch_memory_saver`; None: there is none.
    """

    def __init__(self, saver: Any = None, device: torch.device | None = None) -> None:
        self._saver = saver
        self._device = device or torch.device("cpu")
        self._owner = f"specrollout {next(_numbers)}"  # the package's tags are process-wide

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """The regions of a device. If the package is installed and cannot work, the log says
        why."""
        if device.type != "cuda":
            return cls()
        try:
            from torch_memory_saver import torch_memory_saver as saver
        except ImportError:
            return cls()
        if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
            with suppress(AttributeError):  # it is in use: its mode cannot be set again
                saver.hook_mode = "torch"
        regions = cls(saver, device)
        try:
            with regions.region(MemoryTag.WEIGHTS):
                pass
        except (RuntimeError, OSError) as error:  # expandable segments, another build of torch
            log.warning("torch-memory-saver cannot be used, graphs end with each sleep: %s", error)
            return cls()
        return regions

    @property
    def preserve_addresses(self) -> bool:
        """Whether memory comes back where it was, by `pause` and `resume`."""
        return self._saver is not None

    def region(self, tag: MemoryTag) -> AbstractContextManager[object]:
        """A context: what is allocated in it loses its values when the tag is paused."""
        if self._saver is None:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(gpu.on(self._device))
        stack.enter_context(self._saver.region(tag=self._name(tag)))
        return stack

    def pause(self, tag: MemoryTag) -> None:
        """Give the memory of a tag back. Nothing may touch it until `resume`."""
        self._saver.pause(self._name(tag))

    def resume(self, tag: MemoryTag) -> None:
        """Take it again, with undefined contents."""
        self._saver.resume(self._name(tag))

    def _name(self, tag: MemoryTag) -> str:
        return f"{self._owner} {tag.value}"
