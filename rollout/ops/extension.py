"""The compiled ops, ``rollout.ops._cpu``, set up once: absent only in a source tree not built."""

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
    """Address of the function torch's own OpenMP threads are forked with; 0 if it has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # A symbol is looked up in the library and what it is linked with: torch's runtime, not
        # another copy that numpy or scipy brought.
        torch_cpu = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


IS_INT64 = {torch.int32: False, torch.int64: True}
"""Index tensors the compiled ops read, and whether they are the wide ones."""

DTYPE_CODES: dict[torch.dtype, int] = {}
if cpu is not None:
    cpu.set_gomp_parallel(_gomp_parallel())
    DTYPE_CODES = {
        torch.float32: cpu.FLOAT32,
        torch.bfloat16: cpu.BFLOAT16,
        torch.float16: cpu.FLOAT16,
    }


def supports(*tensors: torch.Tensor) -> bool:
    """Whether the compiled ops take these: on the CPU, of one dtype they know, rows adjacent."""
    dtype = tensors[0].dtype
    if dtype not in DTYPE_CODES:
        return False
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype is not dtype or tensor.stride()[-1] != 1:
            return False
    return True
