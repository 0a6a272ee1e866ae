"""The engine on a pretended GPU: see tests.helpers.fake_cuda. In a process where there is one, or
where Triton is interpreted, these tests skip."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("there is a GPU, or an interpreter", allow_module_level=True)

from tests.helpers.fake_cuda import FakeGpu, pretended_gpu


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with pretended_gpu() as gpu:
        yield gpu
