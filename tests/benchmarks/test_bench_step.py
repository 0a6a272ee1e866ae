"""A timed step runs the requests it is said to run, and none that were timed before."""

from __future__ import annotations

import argparse

import pytest
from bench_step import measure, open_engine
from replay_bench.shapes import Shape, write_config

SHAPE = Shape(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48,
    vocab_size=300,
)  # fmt: skip


@pytest.mark.parametrize("nodes", [0, 3])
def test_batches_after_one_another_share_no_step(tmp_path, nodes: int) -> None:
    options = argparse.Namespace(batch=[1, 4, 2], context=80, device="cpu")
    engine = open_engine(write_config(tmp_path, SHAPE), options, True, nodes)
    for batch in options.batch:
        timed = measure(engine, batch, options.context)
        assert timed.rows == timed.sampled == batch * (1 + nodes)
        assert batch * 75 <= timed.kv_tokens - batch * nodes <= batch * 90
        assert not engine.has_unfinished
    engine.check_integrity()
