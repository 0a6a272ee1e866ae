"""Which variants of its kernels a program would have compiled on Hopper; nothing is launched.

A launch is looked up by what Triton specialises on: dtypes, alignment, integers that are 1 or
multiples of 16, constants and options. Outputs stay what they were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from rollout.ops import gpu

_HOPPER = make_backend(GPUTarget("cuda", 90, 32))

Variants = dict[str, set[Hashable]]


@contextmanager
def launched_variants() -> Iterator[Variants]:
    """Within it CPU tensors go the way of a GPU's; by kernel, the variants that were asked for."""
    found: Variants = defaultdict(set)

    def run(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, _HOPPER)
        _, specialization, options = bind(*args, **kwargs)
        found[kernel.__name__].add((str(specialization), str(sorted(options.items()))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_INTERPRETED", True)
        patch.setattr(gpu, "_INTERPRETED_PROGRAMS", 8)
        patch.setattr(JITFunction, "run", run)
        yield found
