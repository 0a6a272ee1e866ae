"""Packages that a bare machine lacks are installed from wheels brought along, or told."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import gpu_setup
import pytest


def test_what_a_bare_machine_lacks_is_told(capsys) -> None:
    lacking = gpu_setup.missing(
        [
            gpu_setup.Needed("torch", "2.0", "everything"),
            gpu_setup.Needed("torch", "99.0", "everything"),
            gpu_setup.Needed("no-such-distribution", "1", "tests"),
        ]
    )
    assert [each.distribution for each in lacking] == ["torch", "no-such-distribution"]
    assert gpu_setup.numbers("2.11.0+cu130") >= gpu_setup.numbers("2.11")
    gpu_setup.main(["--collect"])
    wanted = capsys.readouterr().out.split()
    assert "nanobind-backend>=1.0" in wanted
    assert not any(each.startswith("torch") for each in wanted)


def test_what_compiles_is_missed_where_there_is_something_to_compile(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    lacking = [gpu_setup.Needed("no-such-compiler", "1", gpu_setup.COMPILING)]
    monkeypatch.setattr(gpu_setup, "NEEDED", lacking)
    setup = ["--wheels", str(tmp_path / "none"), "--site", str(tmp_path / "site")]
    monkeypatch.setattr(gpu_setup, "provide", lambda wheels: [])
    gpu_setup.main(setup)
    assert "missing" not in capsys.readouterr().out
    monkeypatch.setattr(gpu_setup, "provide", lambda wheels: ["ngram_native._ext"])
    with pytest.raises(SystemExit, match="1"):
        gpu_setup.main(setup)
    printed = capsys.readouterr().out
    assert "extensions that are not there: ngram_native._ext" in printed
    assert "missing: no-such-compiler>=1" in printed


def test_a_wheel_that_was_brought_along_is_installed_without_a_registry(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "brought_along-1.2-py3-none-any.whl", "w") as wheel:
        about = "brought_along-1.2.dist-info"
        wheel.writestr("brought_along.py", "")
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: brought-along\nVersion: 1.2\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")
    lacking = [
        gpu_setup.Needed("not-there", "1.0", "tests"),
        gpu_setup.Needed("brought-along", "1.0", "tests"),
    ]
    gpu_setup.install(lacking, wheels, site)
    assert (site / "brought_along.py").exists()
    assert [path.name for path in site.glob("*.dist-info")] == ["brought_along-1.2.dist-info"]


def test_most_of_a_session_needs_neither_extension() -> None:
    """A machine without a compiler measures all but NGRAM."""
    code = """
import sys
sys.modules["ngram_native"] = sys.modules["rollout.ops._cpu"] = None
import bench_generate, bench_gpu_ops, bench_sleep, bench_step, gpu_smoke, profile_step
"""
    folder = Path(gpu_setup.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
