"""The Triton ops: compiled where there is a GPU, and otherwise in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so tests/ops/test_interpreter.py runs this folder
in a process of its own; in any other without a GPU these tests skip.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.helpers.interpreter import quick_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INTERPRETED:
        return
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    """In place of the C++ ops, which this folder does without."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU; tests/ops/test_interpreter.py runs it interpreted")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=(torch.float32, torch.float16, torch.bfloat16), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if INTERPRETED and request.param is torch.bfloat16:
        pytest.skip("the interpreter has no bfloat16 products")
    return request.param


@pytest.fixture(params=(torch.float16, torch.float32, torch.bfloat16), ids=str)
def compared_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """For what is compared bitwise with itself many times: all dtypes where that is quick."""
    if INTERPRETED and request.param is not torch.float16:
        pytest.skip("the interpreter is slow")
    return request.param


@pytest.fixture(autouse=True)
def _poisoned_empty() -> Iterator[None]:
    """As on the CPU; warnings only, as some of torch's own CUDA ops have no deterministic form."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield
