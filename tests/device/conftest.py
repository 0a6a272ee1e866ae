"""An engine as it runs on a GPU: on one, and otherwise in Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when it is imported, so
tests/runner/extended/test_interpreted_engine.py runs this folder in a process of its own; in any
other without a GPU these tests skip.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import save_tiny_llama

pytest.importorskip("triton")

from tests.helpers.interpreter import quick_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session", autouse=True)
def _on_a_device() -> None:
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU, or Triton's interpreter")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(scope="session")
def small_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of two heads, as the interpreter takes a millisecond per program."""
    return save_tiny_llama(
        tmp_path_factory.mktemp("small-llama"), hidden_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, intermediate_size=32, max_positions=256,
    )  # fmt: skip


@pytest.fixture(scope="session", params=["float32"] if INTERPRETED else ["float32", "bfloat16"])
def dtype_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> Iterator[None]:
    with quick_interpreter() if INTERPRETED else nullcontext():
        yield
