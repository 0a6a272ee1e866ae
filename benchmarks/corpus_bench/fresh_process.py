"""Runs a measurement where nothing else has run before."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar
from unittest.mock import patch

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# glibc lets freed memory pile up to twice the largest block freed before; at its initial threshold,
# set so that it stays, memory goes back to the system at once: the dear case. Others ignore it.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


def in_fresh_process(call: Callable[[Argument], Result], argument: Argument) -> Result:
    """What memory costs depends on what was freed before: a heap full of holes hides growth, and
    keeps what is freed from going back to the system. ``call`` is a module's function; Python's
    garbage collector is off."""
    spawn = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, _ALLOCATOR),
        ProcessPoolExecutor(1, mp_context=spawn, initializer=gc.disable) as pool,
    ):
        return pool.submit(call, argument).result()
