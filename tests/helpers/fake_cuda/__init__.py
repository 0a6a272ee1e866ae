"""A CUDA device that is pretended, so that the code for GPUs runs where there is none.

Within ``pretended_gpu()`` torch has one GPU, an H200 by name. What is pretended:

- Tensors on it have shapes, strides, dtypes and the device, and no values: what asks for one is
  noted as a stall, and raises. What mixes devices raises. The CPU's tensors are real.
- ``torch.cuda``: streams, events, graphs, memory and properties (`runtime`). What CUDA refuses
  while a stream is captured raises.
- Pinned memory is ordinary memory. What is read from the device is zeros.
- Kernels of Triton are not run but recorded as Triton would compile them (`launches`).
- ``torch.equal`` of two of its tensors says yes: an engine that starts asks whether rows agree.

Not pretended: what kernels compute, order among streams, how much memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from triton.runtime.jit import JITFunction

from tests.helpers.fake_cuda.launches import Launches
from tests.helpers.fake_cuda.runtime import cuda_functions
from tests.helpers.fake_cuda.seen import Event, Kind, Seen
from tests.helpers.fake_cuda.tensors import Memory, modes, real_from_numpy

__all__ = ["Event", "FakeGpu", "Kind", "Launches", "Seen", "pretended_gpu"]


@dataclass(frozen=True, slots=True)
class FakeGpu:
    seen: Seen
    launches: Launches


@contextmanager
def pretended_gpu() -> Iterator[FakeGpu]:
    seen = Seen()
    gpu = FakeGpu(seen, Launches(seen))

    def run(kernel: JITFunction, *args: object, **kwargs: object) -> None:
        with torch._C.DisableTorchFunction():  # a launch asks each tensor for a dozen attributes
            gpu.launches.run(kernel, *args, **kwargs)

    with ExitStack() as stack:
        for name, function in cuda_functions(seen).items():
            stack.enter_context(patch.object(torch.cuda, name, function))
        stack.enter_context(patch.object(torch, "from_numpy", real_from_numpy(torch.from_numpy)))
        stack.enter_context(patch.object(JITFunction, "run", run))
        # A torch that was built for CUDA would ask a driver.
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        for mode in modes(seen, Memory()):
            stack.enter_context(mode)
        yield gpu
