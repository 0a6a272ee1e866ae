"""The parity chain on a device: plain decoding there is what everything else must equal, bitwise.

Against the CPU's own plain decoding, tokens are the same and logprobs within what rounding allows.
"""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.ops import gpu
from spec_workers.neural.draft_runner import DraftTable
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.replaying import ReplayingCapture, plain_factory
from tests.helpers.tiny_draft import save_tiny_eagle3

from .conftest import INTERPRETED

SHAPED = SamplingParams(
    temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={5: 2.0},
    min_new_tokens=3, max_new_tokens=6, n=2, seed=6,
    raw_logprobs=True, sampling_logprobs=True, top_logprobs=2, entropy=True,
)  # fmt: skip
PLAIN = SamplingParams(temperature=0.8, max_new_tokens=6, n=2, seed=5, ignore_eos=True)
PARAMS = {"plain": PLAIN, "shaped": SHAPED}
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44] * 2]


def engine_options(dtype_name: str, **overrides) -> dict:
    options = {"dtype": dtype_name, "kv_bytes": 1 << 20, "max_running": 4}
    return options | {"device": "cpu" if INTERPRETED else "cuda"} | overrides


def run(engine, name):
    rollouts = engine.generate(PROMPTS, PARAMS[name])
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0
    return rollouts


@pytest.fixture(scope="module")
def plain(small_model_path, dtype_name):
    """Each request's prompt whole, no graphs, no drafts, no cache."""
    options = engine_options(dtype_name, prefix_cache=False, graph_bytes=0)
    engine = RolloutEngine.from_pretrained(str(small_model_path), spec="none", **options)
    return {name: run(engine, name) for name in PARAMS}


def recorded(rollouts):
    return {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in rollouts}


@pytest.mark.parametrize("name", PARAMS)
def test_the_cpu_says_the_same(small_model_path, dtype_name, plain, name, monkeypatch) -> None:
    if dtype_name != "float32":
        pytest.skip("a token may differ where bfloat16 rounds another way")
    monkeypatch.setattr(gpu, "_INTERPRETED", False)  # else the CPU's tensors are the interpreter's
    options = engine_options(dtype_name, device="cpu")
    engine = RolloutEngine.from_pretrained(str(small_model_path), spec="none", **options)
    assert not gpu.runs_on(engine.worker.target.model.device)
    on_cpu = engine.generate(PROMPTS, PARAMS[name])
    assert [r.token_ids for r in on_cpu] == [r.token_ids for r in plain[name]]
    for ours, rollout in zip(on_cpu, plain[name], strict=True):
        np.testing.assert_allclose(ours.logprobs, rollout.logprobs, rtol=0, atol=1e-4)


def test_company_chunks_and_the_cache_cannot_be_seen(small_model_path, dtype_name, plain) -> None:
    options = engine_options(dtype_name, max_running=3, chunk_len=4, graph_bytes=0)
    engine = RolloutEngine.from_pretrained(str(small_model_path), spec="none", **options)
    assert numbers(run(engine, "plain")) == numbers(plain["plain"])


@pytest.mark.parametrize("name", PARAMS)
def test_trees_and_graphs_cannot_be_seen(small_model_path, dtype_name, plain, name) -> None:
    """Captured on a GPU; in the interpreter run again on the same buffers."""
    capture = ReplayingCapture() if INTERPRETED else None
    factory = oracle_factory(recorded(plain[name]), capture, size=5, right=0.8, chain=False)
    config = engine_config(str(small_model_path), engine_options(dtype_name))
    engine = RolloutEngine.from_config(config, factory)
    for _ in range(1 if INTERPRETED else 3):
        rollouts = run(engine, name)
        assert numbers(rollouts) == numbers(plain[name])
        assert sum(r.stats.accepted for r in rollouts) > 0
    assert engine.worker.target.graphs.graph_runner.num_graphs > 0


def test_halves_that_take_turns_cannot_be_seen(small_model_path, dtype_name, plain) -> None:
    """The captured forward's results are read before the other half's forward overwrites them."""
    seen = []
    for overlap in ("never", "always"):
        capture = ReplayingCapture() if INTERPRETED else None
        factory = oracle_factory(recorded(plain["plain"]), capture, size=5, right=0.8, chain=False)
        options = engine_options(dtype_name, overlap=overlap)
        engine = RolloutEngine.from_config(engine_config(str(small_model_path), options), factory)
        rollouts = run(engine, "plain")
        assert sum(r.stats.accepted for r in rollouts) > 0
        assert engine.worker.target.graphs.graph_runner.num_graphs > 0
        seen.append(numbers(rollouts))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", PARAMS)
def test_score_is_what_generation_reported(small_model_path, dtype_name, plain, name) -> None:
    options = engine_options(dtype_name, chunk_len=6, graph_bytes=0)
    engine = RolloutEngine.from_pretrained(str(small_model_path), spec="none", **options)
    rollout = plain[name][-1]
    logprobs, extras = engine.score_with_extras(rollout.prompt_ids, rollout.token_ids, PARAMS[name])
    assert logprobs == rollout.logprobs
    assert extras == rollout.extras


def test_memory_comes_back_and_nothing_is_changed_by_it(
    small_model_path, dtype_name, plain
) -> None:
    capture = ReplayingCapture() if INTERPRETED else None
    config = engine_config(str(small_model_path), engine_options(dtype_name))
    engine = RolloutEngine.from_config(config, plain_factory(capture))
    assert numbers(run(engine, "plain")) == numbers(plain["plain"])
    freed = engine.release_memory(["kv_cache", "weights", "graphs"])
    assert freed["kv_cache"] > 0
    assert freed["weights"] > 0
    engine.resume_memory()
    assert numbers(run(engine, "plain")) == numbers(plain["plain"])


def test_of_a_drafts_table_what_changed_is_sent(
    small_model_path, dtype_name, tmp_path, monkeypatch
) -> None:
    draft = save_tiny_eagle3(
        tmp_path / "draft", small_model_path, layers=(0, 1), num_heads=2, num_kv_heads=1,
        head_dim=16, intermediate_size=32,
    )  # fmt: skip
    spec_options = {
        "draft_path": str(draft), "num_steps": 2, "topk": 2, "num_draft_tokens": 3,
        "budget": "fixed", "calibration_seconds": 0,
    }  # fmt: skip
    engine = RolloutEngine.from_pretrained(
        str(small_model_path), spec="eagle", spec_options=spec_options,
        **engine_options(dtype_name, graph_bytes=0),
    )  # fmt: skip
    apply, ends = DraftTable.apply, []

    def checked(table: DraftTable, tensors, rows_B, ends_B) -> None:
        apply(table, tensors, rows_B, ends_B)
        for row, end in zip(rows_B.tolist(), ends_B.tolist(), strict=True):
            assert table.tensor[row, :end].tolist() == table._kv.table[row, :end].tolist()
            ends.append(end)
            sent.append(len(tensors[table._slots]) / len(rows_B))

    sent: list[float] = []
    monkeypatch.setattr(DraftTable, "apply", checked)
    engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8, ignore_eos=True, n=2))
    assert len(ends) > 6
    assert max(ends) > 8
    # A prompt whole, and then what was accepted: the extension sends it, a proposal nothing.
    assert max(sent) >= 3
    assert sorted(sent)[len(sent) // 2] <= 2
