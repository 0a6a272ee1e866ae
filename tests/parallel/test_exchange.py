"""Exchanges between ranks give what was sent, or name the rank that did not come."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.launch import launch


def test_three_ranks_exchange_tensors(tmp_path: Path) -> None:
    launch("tests.parallel.exchange_ranks", tmp_path, ranks=3)
