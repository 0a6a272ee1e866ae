"""Tests of the Triton ops alone: compiled where there is a GPU, and otherwise interpreted.

Triton reads TRITON_INTERPRET when it is imported, so ../test_interpreter.py runs this folder in a
process of its own; in any other without a GPU these tests skip.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _compiled() -> None:
    """In place of the C++ ops, which this folder does without."""
    if not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a GPU; test_interpreter.py runs it interpreted")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
