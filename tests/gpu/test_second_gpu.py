"""An engine on a GPU that is not the thread's current one."""

from __future__ import annotations

import threading

import pytest
import torch

from rollout import Rollout, RolloutEngine, SamplingParams

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=4)


def test_it_says_the_same_from_any_thread(tiny_model_path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found: list[list[Rollout]] = []
    for device in ("cuda:0", "cuda:1"):
        engine = RolloutEngine.from_pretrained(
            tiny_model_path, spec="none", device=device, dtype="bfloat16", kv_bytes=1 << 24
        )
        thread = threading.Thread(
            target=lambda engine=engine: found.append(
                [*engine.generate([[5, 6, 7]], PARAMS), *engine.generate([[5, 6, 7]], PARAMS)]
            )
        )
        thread.start()
        thread.join()
        graphs = engine.worker.target.graphs
        assert graphs is not None
        assert graphs.graph_runner.num_graphs > 0
        assert not graphs.graph_runner.failure
    first, second = ([(r.token_ids, r.logprobs) for r in rollouts] for rollouts in found)
    assert first == second
