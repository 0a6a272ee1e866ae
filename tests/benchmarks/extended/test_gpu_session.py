"""A session on a GPU: one stage's fault costs no other, no row is lost, and kernels travel."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import gpu_smoke
import pytest
import torch
from gpu_session import ROOT, run
from gpu_stages import CALLS, Stage
from harness.rows import read_records
from triton_cache import pack, unpack

WRITES_A_ROW = """
import sys; from pathlib import Path; sys.path.insert(0, "benchmarks")
from harness.rows import append_record
row = {"name": "a", "value": 1, "unit": "", "bar": 2, "ok": False}
append_record(Path(sys.argv[1]), row)
"""


def script(tmp_path: Path, name: str, code: str, seconds: float = 20, **options) -> Stage:
    path = tmp_path / f"{name}.py"
    path.write_text(code)
    return Stage(name, f"{path} {{rows}}", seconds, **options)


def test_a_stage_that_fails_or_hangs_costs_no_other(tmp_path: Path, capsys) -> None:
    stages = [
        script(tmp_path, "fails", "print('why'); raise SystemExit(3)"),
        script(tmp_path, "hangs", f"{WRITES_A_ROW}\nimport time; time.sleep(60)", seconds=4),
        script(tmp_path, "rows", WRITES_A_ROW, decides=True),
        script(tmp_path, "last", ""),
    ]
    outcomes = run(stages, tmp_path / "output", seconds=60)
    assert [outcome.status for outcome in outcomes] == [
        "failed: exit status 3", "over its limit", "ok", "not begun",
    ]  # fmt: skip
    for outcome in outcomes[1:3]:  # what was written before the limit counts
        assert [each["name"] for each in outcome.rows] == ["a"]
    printed = capsys.readouterr().out
    assert "why" in printed
    assert "missed: a: 1 , bar 2" in printed
    (late,) = run(stages[2:3], tmp_path / "output", seconds=1)
    assert late.status == "not begun"


def test_the_calls_fit_into_a_quarter_of_an_hour() -> None:
    first, second = (sum(stage.seconds for stage in CALLS[call]) for call in ("first", "second"))
    assert first <= 540
    assert second <= 240


@pytest.mark.parametrize("call", sorted(CALLS))
def test_a_call_is_rehearsed_on_a_bare_copy(tmp_path: Path, call: str) -> None:
    """The files that travel, and a bundle with nothing but this clone's extensions."""
    copy = tmp_path / "copy"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    wheels = copy / "build" / "gpu-bundle" / "wheels"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "specrollout-0-cp310-abi3-linux_x86_64.whl", "w") as wheel:
        for name in ("rollout.ops._cpu", "ngram_native._ext"):
            built = Path(importlib.import_module(name).__file__)
            wheel.write(built, f"{name.rpartition('.')[0].replace('.', '/')}/{built.name}")
    # This environment's packages, without the editable install that its `.pth` files make.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": sysconfig.get_path("platlib"),
    }  # fmt: skip
    output = tmp_path / "output"
    rehearsed = [stage.name for stage in CALLS[call] if stage.name != "op-tests"]
    python = str(tmp_path / "venv" / "bin" / "python")
    command = [python, "benchmarks/gpu_session.py", call, "--output", str(output)]
    done = subprocess.run(
        [*command, "--seconds", "1000", "--stage", *rehearsed],
        cwd=copy, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows = [record for record in read_records(output / "rows.jsonl") if "name" in record]
    assert len(rows) >= 10
    assert len(list(output.iterdir())) <= 8
    assert list(copy.glob("rollout/ops/*.so"))


def test_bitwise_checks_pass_where_rows_are_invariant_and_see_where_not(monkeypatch) -> None:
    torch.manual_seed(0)
    for check in ("attention", "sampler", "engine"):
        assert all(each.ok for each in gpu_smoke.checked(check, gpu_smoke.CHECKS[check], "cpu"))

    def by_count(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.float() @ weight.float().T + 1e-3 * (len(x) % 5 == 0)).to(x.dtype)

    monkeypatch.setattr(gpu_smoke, "matmul", by_count)
    products = list(gpu_smoke.checked("matmul", gpu_smoke.products, "cpu"))
    assert [each.ok for each in products] == [False, True]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled")
def test_triton_finds_a_kernel_that_was_compiled_elsewhere(tmp_path: Path, monkeypatch) -> None:
    triton = pytest.importorskip("triton")
    from triton.compiler import ASTSource

    from rollout.ops.glu.triton import _gated_mul_kernel
    from tests.helpers.triton_compile import HOPPER

    types = ("*bf16", "*bf16", "i32", "i32", "fp32", "fp32", "constexpr", "constexpr")
    source = ASTSource(
        fn=_gated_mul_kernel,
        signature=dict(zip(_gated_mul_kernel.arg_names, types, strict=True)),
        constexprs={(6,): 0, (7,): 1024},
    )

    def is_found(cache: Path) -> bool:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
        monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
        hits: list[bool] = []
        monkeypatch.setattr(
            triton.knobs.compilation, "listener", lambda **event: hits.append(event["cache_hit"])
        )
        assert triton.compile(source, target=HOPPER, options={"num_warps": 4}).asm["cubin"]
        return hits == [True]

    archive, there, here = tmp_path / "cache.tar.gz", tmp_path / "there", tmp_path / "here"
    assert not is_found(there)
    pack(there, archive)
    there.rename(tmp_path / "gone")
    unpack(archive, here)
    assert is_found(here)
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    assert "is not used: " in unpack(archive, tmp_path / "damaged")
    assert not is_found(tmp_path / "empty")
