"""Replays of recorded rollouts: what is accepted, what a step costs, and what the engine says."""

from __future__ import annotations

from pathlib import Path

import bench_replay
import numpy as np
import pytest
from bench_replay import replay as replay_by_engine
from budget_replay import PricedDrafter, pick_all, pick_by_worth, roofline
from harness.roofline import Ceilings
from harness.shapes import Shape, write_config, write_draft
from harness.traces import Trace, synthetic_trace, trace_of
from replaying import CorpusDrafter, match_tree, replay

SHAPE = Shape(
    hidden_size=32, num_layers=7, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=48,
    vocab_size=300,
)  # fmt: skip
CEILINGS = Ceilings(name="", bytes_per_second=1e9, flop_per_second=1e12)


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


def test_steps_are_priced_by_their_rows() -> None:
    """Plain decoding's price is a sum by hand; drafting by worth beats it and all nodes."""
    trace = synthetic_trace()
    expected = []
    for step in trace.steps:
        waiting, running, price = [len(trace.responses[r]) for r in step], [], 0.0
        while waiting or running:
            while waiting and len(running) < 64:
                running.append(waiting.pop(0))
            price += float(roofline(np.array(len(running))))
            running = [left - 1 for left in running if left > 1]
        expected.append(price)

    def priced(pick, budget: int) -> PricedDrafter:
        drafter = PricedDrafter(pick)
        replay(trace, drafter, budget=budget, active=64)
        return drafter

    plain = priced(pick_all, 0)
    np.testing.assert_allclose(plain.price_of_step, expected)
    assert priced(pick_by_worth, 16).price < 0.9 * min(plain.price, priced(pick_all, 16).price)


def test_a_replay_drafts_as_the_corpus_does() -> None:
    trace = synthetic_trace()
    priced = replay(trace, PricedDrafter(pick_all), budget=5, active=16)
    expected = replay(trace, CorpusDrafter(), budget=5, active=16)
    assert (priced.forwards_R == expected.forwards_R).all()
    assert (priced.drafted_R == expected.drafted_R).all()


@pytest.mark.parametrize("spec", ["none", "hybrid"])
def test_the_engine_says_what_was_recorded(tmp_path: Path, trace: Trace, spec: str) -> None:
    options = bench_replay.spec_options(spec, 4, write_draft(tmp_path / "draft", SHAPE))
    if spec != "none":
        options |= {"budget": "fixed", "calibration_seconds": 0.0}
    result = replay_by_engine(
        write_config(tmp_path / "model", SHAPE), SHAPE, trace,
        spec=spec, spec_options=options, active=4, num_waves=None, ceilings=CEILINGS, hit_rate=1.0,
        overrides={"device": "cpu", "dtype": "float32", "kv_bytes": 1 << 22},
    )  # fmt: skip
    assert result.total.tokens == trace.num_tokens
    assert (result.total.accept_length > 1.5) == (spec != "none")
