"""Memory of a GPU that is given back and comes back at its addresses, so that CUDA graphs survive
sleep. It takes the package torch-memory-saver, and is for use where that is installed.

This has never been run on a GPU: what the package does was read.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import count
from typing import Any, Self

import torch

from rollout.types import MemoryTag

log = logging.getLogger(__name__)

_numbers = count()


class KeptAddresses:
    """Regions of memory by tag. Without the package, or on a CPU, ``are_kept`` is False, and memory
    made in a region is like any other.

    ``saver``: the package's `torch_memory_saver`; None: there is none.
    """

    def __init__(self, saver: Any = None) -> None:
        self._saver = saver
        self._owner = f"specrollout {next(_numbers)}"  # tags are those of the whole process

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """Those of a device. Where the package is installed and cannot work, the log says why."""
        if device.type != "cuda":
            return cls()
        try:
            from torch_memory_saver import torch_memory_saver as saver
        except ImportError:
            return cls()
        if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
            with suppress(AttributeError):  # it is in use, and its mode settled
                saver.hook_mode = "torch"
        kept = cls(saver)
        try:
            with kept.region(MemoryTag.WEIGHTS):
                pass
        except (RuntimeError, OSError) as error:  # expandable segments, another build of torch
            log.warning(
                "torch-memory-saver is not used, and graphs do not survive sleep: %s", error
            )
            return cls()
        return kept

    @property
    def are_kept(self) -> bool:
        """Whether `pause` and `resume` do anything."""
        return self._saver is not None

    def region(self, tag: MemoryTag) -> AbstractContextManager[object]:
        """A context: what is allocated in it can be paused. Values are lost by that."""
        return nullcontext() if self._saver is None else self._saver.region(tag=self._name(tag))

    def pause(self, tag: MemoryTag) -> None:
        """Give the memory of a tag back. Nothing may touch it until `resume`."""
        self._saver.pause(self._name(tag))

    def resume(self, tag: MemoryTag) -> None:
        """Take it again, at its addresses and with undefined contents."""
        self._saver.resume(self._name(tag))

    def _name(self, tag: MemoryTag) -> str:
        return f"{self._owner} {tag.value}"
