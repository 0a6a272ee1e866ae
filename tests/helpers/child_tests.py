"""Tests in a process of their own, for settings that are read at import or kept for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_tests(paths: Sequence[str], environment: Mapping[str, str], tmp_path: Path) -> None:
    """Run tests with only the plugins they need: importing the others takes longer than some
    tests."""
    plugins = ("-p", "no:cacheprovider", "-p", "pytest_timeout")
    alone = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, f"--basetemp={tmp_path / 'tests'}", *paths],
        env={**os.environ, **alone, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
