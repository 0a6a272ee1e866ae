"""Kernels compiled for Hopper, which needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend

HOPPER = GPUTarget("cuda", 90, 32)
MAX_SHARED, MAX_REGISTERS = 227 * 1024, 65_536  # of a multiprocessor

_CACHE = tempfile.TemporaryDirectory(prefix="triton-")  # this process's own


class Compiled(NamedTuple):
    ptx: str
    registers: int  # of a thread
    stack: int  # bytes of a thread: what registers did not hold
    shared: int  # bytes of a program
    num_warps: int


def compile_for_hopper(
    kernel,
    types: Sequence[str],
    constants: dict[str, object],
    *,
    aligned: Collection[str] = (),
    num_warps: int,
    num_stages: int = 3,
) -> Compiled:
    """``types`` of all arguments; pointers, strides and ``aligned`` are multiples of 16."""
    names = list(kernel.arg_names)
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(names, types, strict=True)),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name.endswith(("_ptr", "_stride")) or name in aligned
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    return compiled(source, options)


def compiled(source: ASTSource, options: Mapping[str, Any]) -> Compiled:
    """The kernel compiled by Triton and ptxas. Raises what they raise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", _CACHE.name)
        kernel = compile(source, target=HOPPER, options=dict(options))
    registers, stack = _registers_and_stack(kernel.asm["cubin"])
    metadata = kernel.metadata
    return Compiled(kernel.asm["ptx"], registers, stack, metadata.shared, metadata.num_warps)


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2])


def dialects(source: ASTSource, options: Mapping[str, Any]) -> Iterator[str]:
    """A kernel in Triton's dialect, then in that for GPUs, where tensors have layouts: each is made
    when it is asked for, long before machine code."""
    backend = make_backend(HOPPER)
    parsed = backend.parse_options(dict(options) | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        HOPPER,
        parsed,
        backend.get_codegen_implementation(parsed),
        backend.get_module_map(),
        context,
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, parsed, source.language)
    metadata = {"target": HOPPER, **parsed.__dict__}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
        yield str(module)
