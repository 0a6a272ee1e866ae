"""Exchanges between ranks: shared memory has gloo's bits, and says which rank did not come."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.launch import launch


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")
def test_three_ranks_exchange_tensors(tmp_path: Path) -> None:
    launch("tests.parallel.exchange_ranks", tmp_path, ranks=3)
