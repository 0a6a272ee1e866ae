"""Ops run on the CPU, compiled, and on a GPU where there is one; extended/test_interpreter.py runs
those that have Triton kernels interpreted too, where the CPU's tensors go the way of a GPU's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from rollout.ops.extension import cpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu"]
if torch.cuda.is_available() and not INTERPRETED:
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    if cpu is None and not INTERPRETED:
        pytest.skip("rollout.ops._cpu is not built")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def is_gpu(device: torch.device) -> bool:
    """Whether Triton's kernels run."""
    return INTERPRETED or device.type == "cuda"


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if INTERPRETED and request.param is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16 products")
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def compared_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """For what is compared bitwise with itself many times: all dtypes where that is quick."""
    if INTERPRETED and request.param is not torch.float16:
        pytest.skip("the interpreter is slow")
    return request.param


@pytest.fixture
def rounds() -> Callable[[int], int]:
    """A number, or a tenth of it where the interpreter is slow."""
    return lambda count: max(1, count // 10) if INTERPRETED else count


@pytest.fixture(autouse=True)
def set_threads() -> Iterator[Callable[[int], None]]:
    """One thread unless a test asks for more: spinning teams crawl on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    """torch.empty hands out NaN: what an op leaves unwritten shows. Some of torch's own CUDA ops
    have no deterministic form, and warn."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=INTERPRETED or torch.cuda.is_available())
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    context = nullcontext()
    if INTERPRETED:
        from tests.helpers.interpreter import quick_interpreter

        context = quick_interpreter()
    with context:
        yield
