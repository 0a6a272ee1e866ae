"""The kernels a program would launch on Hopper; nothing is launched, and outputs stay as they were.

A kernel's variant is what Triton would compile it for: dtypes, alignment, integers that are 1 or
multiples of 16, constants and options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from rollout.ops import gpu

_HOPPER = make_backend(GPUTarget("cuda", 90, 32))


class Launch(NamedTuple):
    name: str
    variant: str
    arguments: str  # the grid and all arguments, tensors by shape, strides and dtype


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """A context in which CPU tensors go the way of a GPU's and launches are recorded."""
    found: list[Launch] = []

    @cache
    def binder(kernel: JITFunction) -> Callable[..., Any]:
        return create_function_from_signature(kernel.signature, kernel.params, _HOPPER)

    def run(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
        bind = binder(kernel)
        values, specialization, options = bind(*args, **kwargs)
        variant = f"{specialization} {sorted(options.items())}"
        found.append(Launch(kernel.__name__, variant, f"{grid} {_described(values)}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_INTERPRETED", True)
        patch.setattr(gpu, "_INTERPRETED_PROGRAMS", 8)
        patch.setattr(JITFunction, "run", run)
        yield found


class RecordedOps(TorchDispatchMode):
    """torch's own ops, among the launches they come between."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        described = f"{_described(args)} {_described(kwargs or {})}"
        self._launches.append(Launch(str(func), "", described))
        return func(*args, **(kwargs or {}))


def num_variants(launches: Sequence[Launch]) -> Counter[str]:
    """The number of variants of each kernel."""
    return Counter(name for name, _ in {(launch.name, launch.variant) for launch in launches})


def _described(values: object) -> str:
    def described(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.stride(), str(value.dtype)
        return value

    return str(tree_map(described, values))
