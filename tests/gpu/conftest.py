"""Tests that need a GPU, and skip without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
