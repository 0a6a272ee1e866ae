"""Runs tests/device in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.child_tests import run_tests


@pytest.mark.timeout(3600)
def test_a_devices_engine_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run_tests([str(Path(__file__).parents[2] / "device")], {"TRITON_INTERPRET": "1"}, tmp_path)
