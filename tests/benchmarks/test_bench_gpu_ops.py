"""The benchmark of the GPU ops where there is none, and its sums by hand."""

from __future__ import annotations

import json

import bench_gpu_ops
import pytest
import tile_sweep
import torch
from harness.roofline import Ceilings
from harness.shapes import Shape
from op_case import Case, Workload, make_padded_plan, row_cases

H200 = Ceilings(name="NVIDIA H200", bytes_per_second=4.8e12, flop_per_second=990e12)


def test_without_a_gpu_nothing_is_judged(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "rows.json"
    bench_gpu_ops.make_command().run("", bench_gpu_ops.parts, ["--json", str(path)])
    rows = json.loads(path.read_text())
    assert [(row["value"], row["ok"], row["bar"]) for row in rows] == [(None, None, 0.7)] * 3
    printed = capsys.readouterr().out
    assert "no GPU here" in printed
    assert printed.count("not run") == 3


def test_a_floor_is_the_larger_of_bytes_and_arithmetic() -> None:
    case = Case(name="", ours=(), num_bytes=4.8e6, flop=1.98e9)
    assert case.floor_us(H200) == pytest.approx(2)
    case = Case(name="", ours=(), num_bytes=14.4e6, flop=1.98e9)
    assert case.floor_us(H200) == pytest.approx(3)


def test_attention_is_timed_as_an_engine_pads_it() -> None:
    load = Workload(name="", requests=5, start=99, nodes=2, straggler=1299)
    plan, rows = make_padded_plan(load, "cpu")
    assert (rows, len(plan.rows_B), len(plan.node_slots_N), plan.longest) == (16, 16, 16, 2048)
    assert plan.q_offsets_B1.tolist() == [0, 3, 6, 9, 12, *[15] * 12]
    assert plan.starts_B[:5].tolist() == [99, 99, 99, 99, 1299]
    assert load.slots == 4 * 102 + 1302
    of_nodes = plan.node_slots_N[:10].view(5, 2)
    of_runs = [plan.req_to_token[b, : start + 1] for b, start in enumerate(load.starts)]
    slots = torch.cat([torch.cat(each) for each in zip(of_runs, of_nodes, strict=True)])
    assert slots.sort()[0].tolist() == list(range(load.slots))
    large = Workload(name="", requests=1, start=0, run_len=1300)
    assert make_padded_plan(large, "cpu")[1] == 1300


def test_row_ops_and_torchs_are_the_same_op() -> None:
    torch.manual_seed(0)
    shape = Shape(
        hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=48,
        vocab_size=9,
    )  # fmt: skip
    for case in row_cases(shape, 5, "cpu", buffers=2):
        assert len(case.ours) == len(case.theirs) == 2
        inputs = [each for each in case.ours[0].args if isinstance(each, torch.Tensor)]
        before = [each.clone() for each in inputs]
        ours = [case.ours[0](), *(each.clone() for each in inputs)]
        for each, old in zip(inputs, before, strict=True):
            each.copy_(old)
        theirs = [case.theirs[0](), *inputs]
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)


def test_a_step_is_all_layers_and_the_head() -> None:
    ops = ("silu_mul", "rotary_store_kv", "add_rms_norm", "categorical")
    products = (*bench_gpu_ops.LINEARS, "head")
    times = {f"{op} 8 rows": (1.0, 1.0) for op in ops}
    times |= {f"matmul {name} 8 rows": (3.0, 2.0) for name in products}
    times["attention decode 8"] = (5.0, 9.0)
    exact = bench_gpu_ops.step_us(times, 8, "decode 8", fast=False)
    fast = bench_gpu_ops.step_us(times, 8, "decode 8", fast=True)
    assert exact == bench_gpu_ops.LAYERS * (4 * 3 + 2 + 2 + 5) + 3 + 1
    assert fast == bench_gpu_ops.LAYERS * (4 * 2 + 2 + 2 + 5) + 2 + 1


@pytest.mark.parametrize("rows", tile_sweep.ROWS)
def test_a_sweep_tries_tiles_that_fit(rows: int) -> None:
    tried = list(tile_sweep.neighbours(rows))
    assert 5 < len(set(tried)) == len(tried) <= 30
    for tile in tried:
        stage = 2 * tile.features * (tile.height + tile.outputs)
        assert tile.programs * (tile.stages * stage + 1024) <= 227 * 1024
        assert tile.stages >= 3


def test_the_padding_of_tiles_needs_no_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    bench_gpu_ops.make_command().run("", bench_gpu_ops.parts, ["--ops", "padding"])
    printed = capsys.readouterr().out
    assert "qkv 144 rows: padded, 80 x" in printed
    assert "missed" not in printed
