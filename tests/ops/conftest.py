from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rollout.ops.extension import cpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    if cpu is None:
        pytest.skip("rollout.ops._cpu is not built")


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def set_threads() -> Iterator[Callable[[int], None]]:
    """One thread unless a test asks for more: spinning teams crawl on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    """torch.empty hands out NaN: what an op leaves unwritten shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
