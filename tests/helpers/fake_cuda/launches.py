"""Launches of Triton kernels on a pretended GPU, and whether each compiles for a real one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.helpers.fake_cuda.seen import Kind, Seen

HOPPER = GPUTarget("cuda", 90, 32)
MOST_SHARED = 232_448  # bytes of a block
MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)


@dataclass(frozen=True, slots=True)
class Pointer:
    """All of a tensor that a launch looks at: its dtype, and where it lies."""

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
    source: tuple[dict, dict, dict, dict] = field(
        repr=False
    )  # signature, constants, attrs, options

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    shared_bytes: int
    registers: int
    stack_bytes: int
    num_warps: int


class Launches:
    """``run`` stands in for JITFunction.run."""

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
        packed = kernel._pack_args(self._backend, kwargs, bound, specialization, options)
        chosen, signature, constants, attrs = packed
        self.all.append(
            Launch(
                kernel=kernel,
                grid=grid,
                key=key,
                in_capture=self._seen.in_capture,
                problems=tuple(
                    f"{kernel.__name__}: {problem}" for problem in _problems(grid, values)
                ),
                source=(signature, constants, attrs, chosen.__dict__),
            )
        )
        self._seen.note(Kind.LAUNCH, kernel.__name__)

    def distinct(self) -> list[Launch]:
        """One of each that is compiled by itself."""
        return list({launch.key: launch for launch in self.all}.values())


def _problems(grid: tuple[int, ...], values: dict[str, Any]) -> Iterator[str]:
    for programs, most, axis in zip(grid, MOST_PROGRAMS, "xyz", strict=False):
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


def compiled(launch: Launch) -> Compiled:
    """By Triton and ptxas, for Hopper. Raises what they raise."""
    signature, constants, attrs, options = launch.source
    kernel = compile(
        ASTSource(launch.kernel, signature, constants, attrs), target=HOPPER, options=dict(options)
    )
    registers, stack = _resources(kernel.asm["cubin"])
    return Compiled(
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        stack_bytes=stack,
        num_warps=kernel.metadata.num_warps,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def _pointer(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Allocations begin at multiples of 512 bytes; a view where it begins in one.
    return Pointer(value.dtype, 512 + value.storage_offset() * value.itemsize)
