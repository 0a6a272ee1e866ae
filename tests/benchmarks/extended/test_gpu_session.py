"""A session on a GPU: one stage's fault costs no other, no row is lost, and kernels travel."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path

import gpu_merge
import gpu_smoke
import pytest
import torch
from gpu_session import ROOT, _command, run
from gpu_stages import Stage, stages
from harness.rows import append_record, finish, row
from triton_cache import pack, unpack

ROWS = (
    "import sys; from pathlib import Path; sys.path.insert(0, 'benchmarks'); "
    "from harness.rows import append_record; append_record(Path(sys.argv[-1]), "
    "{'name': 'a', 'value': 1, 'unit': '', 'bar': 2, 'ok': False})"
)


def script(name: str, code: str, seconds: float = 20, **options) -> Stage:
    return Stage(name=name, command=("-c", code), seconds=seconds, **options)


def test_a_stage_that_fails_or_hangs_costs_no_other(tmp_path: Path, capsys) -> None:
    outcomes = run(
        [
            script("fails", "print('why'); raise SystemExit(3)", rows=False),
            script("hangs", f"import time\n{ROWS}\ntime.sleep(60)", seconds=4),
            script("long", "", seconds=1000, rows=False),
            script("gpu", "", needs_gpu=True),
            script("rows", ROWS),
        ],
        tmp_path,
        seconds=60,
        on_gpu=False,
    )
    assert [outcome.status for outcome in outcomes] == [
        "failed: exit status 3", "over its limit", "not begun", "skipped: it needs a GPU", "ok",
    ]  # fmt: skip
    for outcome in (outcomes[1], outcomes[4]):  # what was written before the limit counts
        assert [each["name"] for each in outcome.rows] == ["a"]
    printed = capsys.readouterr().out
    assert "why" in printed
    assert "MISSED  a: 1 , bar 2" in printed


def test_calls_are_merged_the_newest_row_first(tmp_path: Path, capsys) -> None:
    for folder, began, values in (("1", 100, {"a": 1, "b": 1}), ("2", 200, {"b": 2})):
        path = tmp_path / folder / "rows.jsonl"
        append_record(path, {"stage": "smoke", "status": "begun", "seconds": 0, "time": began})
        finish("", [row(name, value, "ms", 2) for name, value in values.items()], path)
        append_record(path, {"stage": "smoke", "status": "ok", "seconds": 1, "time": began + 1})
    merged = tmp_path / "all.json"
    gpu_merge.main([str(tmp_path / "2"), str(tmp_path / "1"), "--json", str(merged)])
    found = {each["name"]: each["value"] for each in json.loads(merged.read_text())}
    assert found == {"a": 1, "b": 2}
    assert "missing: sweep (never asked for)" in capsys.readouterr().out


@pytest.mark.parametrize("on_gpu", [True, False])
def test_stages_name_files_and_options_that_exist(on_gpu: bool) -> None:
    listed = stages([Path("trace.npz")], on_gpu=on_gpu)
    assert len({stage.name for stage in listed}) == len(listed)
    for stage in listed:
        for part in stage.command:
            if part.startswith(("tests/", "benchmarks/")):
                assert (ROOT / part).exists(), stage.name
        if stage.command[0].endswith("gpu_setup.py") or stage.tests:
            continue
        benchmark = importlib.import_module(Path(stage.command[0]).stem)
        given = _command(stage, Path("out"), Path("report"), None)[1:]
        assert benchmark.make_command().parse(given).json == Path("out/rows.jsonl")


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
    pack(there, archive, 16 << 20)
    there.rename(tmp_path / "gone")
    unpack(archive, here)
    assert is_found(here)
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    assert "is not used: " in unpack(archive, tmp_path / "damaged")
    assert not is_found(tmp_path / "empty")
