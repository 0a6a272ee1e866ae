"""Replays of recorded rollouts: what is accepted, what a step costs, and what the engine says."""

from __future__ import annotations

from pathlib import Path

import bench_replay
import numpy as np
import pytest
from bench_replay import replay as replay_by_engine
from harness.shapes import Shape, write_config, write_draft
from harness.traces import Trace, trace_of
from replaying import match_tree

SHAPE = Shape(
    hidden_size=32, num_layers=7, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48,
    vocab_size=300,
)  # fmt: skip


@pytest.fixture
def trace() -> Trace:
    """Two steps of four responses to two prompts; each repeats a phrase of its prompt."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 9).astype(np.int32) for _ in range(2)]
    responses = [np.tile(prompts[r % 2], 3)[: 12 + r] for r in range(8)]
    return trace_of("small", prompts, responses, np.arange(8) % 2, [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_the_longest_match_agrees_with_trying_all_paths() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        size, begin = int(rng.integers(0, 12)), int(rng.integers(0, 3))
        tokens = rng.integers(0, 2, begin + size + 2).tolist()  # siblings repeat one another
        parents = [0] * begin + [int(rng.integers(0, j + 1)) for j in range(size)] + [0, 0]
        to_come = rng.integers(0, 2, int(rng.integers(1, 9))).tolist()
        at = int(rng.integers(0, len(to_come)))
        longest = 0
        for node in range(1, size + 1):
            path, above = [], node
            while above:
                path.insert(0, tokens[begin + above - 1])
                above = parents[begin + above - 1]
            if to_come[at : at + len(path)] == path:
                longest = max(longest, len(path))
        assert max(match_tree(tokens, parents, begin, begin + size, to_come, at)) == longest


@pytest.mark.parametrize("spec", ["none", "hybrid"])
def test_the_engine_says_what_was_recorded(tmp_path: Path, trace: Trace, spec: str) -> None:
    options = bench_replay.spec_options(spec, 4, write_draft(tmp_path / "draft", SHAPE))
    if spec != "none":
        options |= {"budget": "fixed", "calibration_seconds": 0.0}
    result = replay_by_engine(
        write_config(tmp_path / "model", SHAPE), trace, spec=spec, spec_options=options, active=4,
        num_waves=None, hit_rate=1.0, device="cpu", dtype="float32", kv_bytes=1 << 22,
    )  # fmt: skip
    assert result.tokens == trace.num_tokens
    assert (result.accept_length > 1.5) == (spec != "none")
