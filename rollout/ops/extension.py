"""Imports the compiled ops, ``rollout.ops._cpu``, which only an unbuilt source tree lacks."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

__all__ = ["DTYPE_CODES", "IS_INT64", "cpu", "supports"]

try:
    import rollout.ops._cpu as cpu
except ModuleNotFoundError as error:
    if error.name != "rollout.ops._cpu":
        raise
    cpu = None  # type: ignore[assignment]


def _gomp_parallel() -> int:
    """Address of GOMP_parallel, which starts torch's own OpenMP threads; 0 if torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # The lookup searches the library and its dependencies, so it finds torch's runtime and not
        # a copy that numpy or scipy loaded.
        torch_cpu = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


IS_INT64 = {torch.int32: False, torch.int64: True}
"""Dtypes of index tensors that the compiled ops read, and whether they are int64."""

DTYPE_CODES: dict[torch.dtype, int] = {}
if cpu is not None:
    cpu.set_gomp_parallel(_gomp_parallel())
    DTYPE_CODES = {
        torch.float32: cpu.FLOAT32,
        torch.bfloat16: cpu.BFLOAT16,
        torch.float16: cpu.FLOAT16,
    }


def supports(*tensors: torch.Tensor) -> bool:
    """Whether the compiled ops take these tensors: CPU, one known dtype, contiguous last dims."""
    dtype = tensors[0].dtype
    if dtype not in DTYPE_CODES:
        return False
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype is not dtype or tensor.stride()[-1] != 1:
            return False
    return True
