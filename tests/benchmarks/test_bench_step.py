"""A timed step runs the requests it is said to run, and none that were timed before."""

from __future__ import annotations

import argparse
from pathlib import Path

import bench_step
import family_steps
import profile_step
import pytest
import torch
from bench_step import measure, shape_rows
from decoding import LENGTHS, context_lengths, open_engine
from family_steps import family_rows
from harness.roofline import Ceilings, bandwidth_name, rate_name
from harness.rows import append_record
from harness.shapes import Shape, write_config

SHAPE = Shape(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48,
    vocab_size=300,
)  # fmt: skip


@pytest.mark.parametrize("nodes", [0, 3])
def test_batches_after_one_another_share_no_step(tmp_path, nodes: int) -> None:
    loads = [[80], [80] * 4, [80, 300]]
    engine = open_engine(
        write_config(tmp_path, SHAPE), loads, device="cpu", exact=True, nodes=nodes
    )
    for lengths in loads:
        timed = measure(engine, lengths)
        batch = len(lengths)
        assert timed.rows == timed.sampled == batch * (1 + nodes)
        low, high = sum(lengths) - 5 * batch, sum(lengths) + 10 * batch
        assert low <= timed.kv_tokens - batch * nodes <= high
        assert not engine.has_unfinished
    with pytest.raises(RuntimeError, match="no room: 40 requests"):
        measure(engine, [800] * 40)
    assert not engine.has_unfinished
    engine.check_integrity()


@pytest.mark.parametrize("kind", LENGTHS)
def test_lengths_are_as_they_are_called(kind: str) -> None:
    lengths = context_lengths(kind, 16, 2048)
    assert len(lengths) == 16
    assert max(lengths) == {"even": 2048, "mixed": 3584, "straggler": 8 * 2048}[kind]
    assert (
        sum(length == 2048 for length in lengths) == {"even": 16, "mixed": 0, "straggler": 15}[kind]
    )
    assert min(context_lengths("mixed", 4, 80)) >= 72


def test_a_kind_of_step_that_fails_costs_no_other(monkeypatch, capsys) -> None:
    opened = bench_step.open_engine

    def failing(folder, loads, *, device, exact, nodes):
        if exact and not nodes:
            raise torch.OutOfMemoryError("too large")
        return opened(folder, loads, device=device, exact=exact, nodes=nodes)

    monkeypatch.setattr(bench_step, "open_engine", failing)
    options = argparse.Namespace(
        batch=[2], context=80, device="cpu", nodes=2, lengths=["even"], floors=None
    )
    rows = {row.name: row for row in shape_rows("8b", SHAPE, options)}
    assert "too large" in capsys.readouterr().err
    load = "8b, 80 keys, batch 2"
    assert rows[f"{load}, exact"].ok is None
    measured = {name for name, row in rows.items() if row.value is not None}
    assert measured == {
        f"{load}, {kind}{figure}"
        for kind in ("exact, 2 draft nodes each", "fast", "fast, 2 draft nodes each")
        for figure in ("", ": floor / time")
    } | {f"{load}, fast, 2 draft nodes each / none", f"{load}, 2 draft nodes each: exact / fast"}


def test_families_are_timed_by_what_a_layer_adds(monkeypatch) -> None:
    plain = {"architectures": ["Qwen3ForCausalLM"]}
    windowed = {"architectures": ["MistralForCausalLM"], "sliding_window": 20}
    latent = family_steps.FAMILIES["latent attention"][1] | {"num_key_value_heads": 2}
    monkeypatch.setattr(family_steps, "DEEP", 2)
    monkeypatch.setattr(family_steps, "SHALLOW", 1)
    monkeypatch.setattr(family_steps, "TIMED", 3)
    monkeypatch.setattr(family_steps, "DENSE_MODELS", {"dense": (SHAPE, plain)})
    monkeypatch.setattr(
        family_steps,
        "FAMILIES",
        {"windows": (SHAPE, windowed, "dense", 1e9), "latent": (SHAPE, latent, "dense", 0.0)},
    )
    options = argparse.Namespace(context=80, device="cpu")
    rows = {row.name: row for row in family_rows(options)}
    load = "a layer, 80 keys, batch 8"
    assert set(rows) == {
        f"{load}: {name}"
        for name in ("dense", "windows", "latent", "windows / dense", "latent / dense")
    }
    assert rows[f"{load}: windows / dense"].bar == 1e9
    assert rows[f"{load}: latent / dense"].unit == "x"


@pytest.mark.parametrize(
    ("device_name", "judged"),
    [("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", True), ("CPU", False)],
)
def test_bars_rest_on_what_the_device_was_measured_to_do(device_name: str, judged: bool) -> None:
    ceilings = Ceilings(name=device_name, bytes_per_second=3e12, flop_per_second=7e14)
    steps = bench_step.Steps("8b", SHAPE, ceilings, 2048)
    found = []
    for exact, nodes, took in ((True, 0, 2.0), (True, 8, 3.1), (False, 0, 1.0), (False, 8, 1.1)):
        for batch in (8, 32):
            timed = bench_step.Timed(step_ms=took, rows=batch, sampled=batch, kv_tokens=2048)
            found += steps.rows("even", timed, batch, exact, nodes)
    bars = {row.name.removeprefix("8b, 2048 keys, "): (row.bar, row.ok) for row in found}
    expected = {
        "batch 8, exact: floor / time": (0.7, False),
        "batch 8, exact, 8 draft nodes each / none": (1.15, False),
        "batch 32, exact, 8 draft nodes each / none": (1.5, False),
        "batch 8, fast, 8 draft nodes each / none": (1.15, True),
        "batch 8: exact / fast": (1.6, False),
    }
    for name, verdict in expected.items():
        assert bars[name] == (verdict if judged else (None, True))


def test_floors_are_those_of_the_same_device_and_measured_else(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.jsonl"
    for name, value in ((bandwidth_name("CPU"), 2.0), (rate_name("NVIDIA H200"), 790.0)):
        append_record(path, {"name": name, "value": value})
    monkeypatch.setattr("harness.roofline._measure", lambda device: 5.0)
    found = Ceilings.of(torch.device("cpu"), path)
    assert (found.bytes_per_second, found.flop_per_second) == (2e12, 5.0)


def test_a_profile_tells_operators_and_keeps_a_trace_that_fits(tmp_path, monkeypatch) -> None:
    options = argparse.Namespace(
        case=[(1, 0)], context=80, device="cpu", traces=tmp_path / "traces"
    )
    rows = {row.name: row.value for row in profile_step.shape_rows("tiny", SHAPE, options)}
    label = "profile, tiny, 80 keys, batch 1, exact"
    assert rows[f"{label}: step"] > 0
    told = [value for name, value in rows.items() if "::" in name or name.endswith("others")]
    assert sum(told) == pytest.approx(rows[f"{label}: all kernels"], rel=0.01)
    trace = tmp_path / "traces" / "trace-tiny-1-0.json.gz"
    assert trace.read_bytes()[:2] == b"\x1f\x8b"
    assert profile_step.case("8+3") == (8, 3)

    class Large:
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_bytes(bytes(100))

    monkeypatch.setattr(profile_step, "MAX_TRACE_BYTES", 50)
    profile_step.write_trace(Large(), trace)
    assert not trace.exists()
