"""Kernels compiled for Hopper, which needs no GPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile


def compile_for_hopper(
    kernel,
    types: Sequence[str],
    constants: dict[str, object],
    *,
    aligned: Collection[str] = (),
    num_warps: int,
    num_stages: int = 3,
) -> str:
    """PTX. ``types`` of all arguments; pointers, strides and ``aligned`` are multiples of 16."""
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
    compiled = compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False},
    )
    return compiled.asm["ptx"]
