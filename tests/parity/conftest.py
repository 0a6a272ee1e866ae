"""One thread, and models that all of the folder's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.helpers.parity_models import ParityModels


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models are so small that threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> ParityModels:
    return ParityModels(tmp_path_factory.mktemp("parity"))
