"""Launches of Triton kernels on a pretended GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.helpers.fake_cuda.seen import Kind, Seen
from tests.helpers.triton_compile import HOPPER

MAX_PROGRAMS = (2**31 - 1, 65_535, 65_535)


@dataclass(frozen=True, slots=True)
class Pointer:
    """The parts of a tensor that a launch looks at: its dtype and its address."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    kernel: JITFunction
    grid: tuple[int, ...]
    key: str  # what it is compiled for
    in_capture: bool
    problems: tuple[str, ...]  # what a real launch would refuse, or the kernel does not expect
    arguments: tuple[dict, dict, dict] = field(repr=False)  # signature, constants, attributes
    options: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def source(self) -> ASTSource:
        return ASTSource(self.kernel, *self.arguments)


class Launches:
    """The launches of Triton kernels. ``run`` stands in for JITFunction.run."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._binders: dict[JITFunction, Callable] = {}
        self._backend = make_backend(HOPPER)
        self.all: list[Launch] = []

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(
                kernel.signature, kernel.params, self._backend
            )
        kwargs["debug"] = kwargs.get("debug", kernel.debug) or False
        pointers = [_pointer(value) for value in args]
        options_given = {name: _pointer(value) for name, value in kwargs.items()}
        bound, specialization, options = self._binders[kernel](*pointers, **options_given)
        names = list(bound)
        values = dict(zip(names, args, strict=False)) | kwargs
        grid = grid(bound) if callable(grid) else tuple(grid)
        key = f"{kernel.__module__}.{kernel.__name__} {specialization} {options} " + str(
            {name: bound[name] for name, (kind, *_) in zip(names, specialization, strict=True)
             if kind == "constexpr"}
        )  # fmt: skip
        problems = list(_problems(grid, values))
        if options.get("enable_fp_fusion", True):
            problems.append("multiplications and additions may be fused")
        packed = kernel._pack_args(self._backend, kwargs, bound, specialization, options)
        chosen, signature, constants, attrs = packed
        self.all.append(
            Launch(
                kernel=kernel,
                grid=grid,
                key=key,
                in_capture=self._seen.in_capture,
                problems=tuple(f"{kernel.__name__}: {problem}" for problem in problems),
                arguments=(signature, constants, attrs),
                options=dict(chosen.__dict__),
            )
        )
        self._seen.note(Kind.LAUNCH, kernel.__name__)

    def distinct(self) -> list[Launch]:
        """One launch of each variant that is compiled by itself."""
        return list({launch.key: launch for launch in self.all}.values())


def _problems(grid: tuple[int, ...], values: dict[str, Any]) -> Iterator[str]:
    for programs, most, axis in zip(grid, MAX_PROGRAMS, "xyz", strict=False):
        if not 0 < programs <= most:
            yield f"{programs} programs along {axis}"
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        if not value.is_cuda:
            yield f"{name} is on {value.device}"
        # The gate of shared experts is a column; its kernel is told the stride.
        if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1 and name != "gate_ptr":
            yield f"{name} has strides {value.stride()}"


def _pointer(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Allocations begin at multiples of 512 bytes; a view where it begins in one.
    return Pointer(value.dtype, 512 + value.storage_offset() * value.itemsize)
