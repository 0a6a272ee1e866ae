"""The benchmark of the GPU ops where there is none, and its sums by hand."""

from __future__ import annotations

import json
import sys

import bench_gpu_ops
import pytest
import tile_sweep
import torch
from attention_workload import Workload, make_padded_plan
from replay_bench.roofline import Ceilings

H200 = Ceilings(name="NVIDIA H200", bytes_per_second=4.8e12, flop_per_second=990e12)


def test_without_a_gpu_nothing_is_judged(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu_ops.py", "--json", str(tmp_path / "rows.json")])
    bench_gpu_ops.main()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["value"], row["ok"], row["bar"]) for row in rows] == [(None, None, 0.7)] * 3
    printed = capsys.readouterr().out
    assert "no GPU here" in printed
    assert printed.count("not run") == 3


def test_a_floor_is_the_larger_of_bytes_and_arithmetic() -> None:
    case = bench_gpu_ops.Case(name="", ours=(), num_bytes=4.8e6, flop=1.98e9)
    assert case.floor_us(H200) == pytest.approx(2)
    case = bench_gpu_ops.Case(name="", ours=(), num_bytes=14.4e6, flop=1.98e9)
    assert case.floor_us(H200) == pytest.approx(3)


def test_attention_is_timed_as_an_engine_pads_it() -> None:
    load = Workload(name="", requests=5, start=99, nodes=2, straggler=1299)
    plan, rows = make_padded_plan(load, "cpu")
    assert (rows, len(plan.rows_B), len(plan.node_slots_N), plan.longest) == (16, 8, 16, 2048)
    assert plan.q_offsets_B1.tolist() == [0, 3, 6, 9, 12, 15, 15, 15, 15]
    assert plan.starts_B[:5].tolist() == [99, 99, 99, 99, 1299]
    assert load.slots == 4 * 102 + 1302
    of_nodes = plan.node_slots_N[:10].view(5, 2)
    of_runs = [plan.req_to_token[b, : start + 1] for b, start in enumerate(load.starts)]
    slots = torch.cat([torch.cat(each) for each in zip(of_runs, of_nodes, strict=True)])
    assert slots.sort()[0].tolist() == list(range(load.slots))
    large = Workload(name="", requests=1, start=0, run_len=1300)
    assert make_padded_plan(large, "cpu")[1] == 1300


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
    assert 5 < len(set(tried)) == len(tried) < 30
    for tile in tried:
        stage = 2 * tile.features * (tile.height + tile.outputs)
        assert tile.programs * (tile.stages * stage + 1024) <= 227 * 1024
        assert tile.stages >= 3


def test_the_padding_of_tiles_needs_no_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu_ops.py", "--ops", "padding"])
    bench_gpu_ops.main()
    printed = capsys.readouterr().out
    assert "qkv 144 rows: padded, 160 x" in printed
    assert "missed" not in printed
