"""How much of the state pool requests hold, between steps and within."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from table import Row, row

from hybrid_bench.engines import random_engine, states_bytes
from hybrid_bench.hybrid_shapes import SMALL, write_hybrid_config
from rollout import SamplingParams

_RUNNING, _NODES, _TOKENS = 16, 8, 48


def state_memory_rows(folder: Path) -> list[Row]:
    """Greedy requests over random weights repeat themselves, so the corpus has drafts for them."""
    write_hybrid_config(folder, SMALL)
    engine = random_engine(
        folder,
        "ngram",
        max_running=_RUNNING,
        prefix_cache=False,
        kv_bytes=1 << 29,
        spec_options={"num_draft_tokens": _NODES, "budget": "fixed", "calibration_seconds": 0},
    )
    worker: Any = engine.worker
    pool, states = worker.target.state_pool, worker.memory.states
    pool_bytes = sum(each.nbytes for each in pool.convolutions + pool.recurrent)
    slot_bytes = pool_bytes / (pool.num_slots + 1)
    in_step: list[tuple[int, int]] = []  # slots held, and what the step has reason to hold
    verify = worker.target.verify

    def watched(batch: Any, trees: Any) -> Any:
        reserved = sum(1 + len(entry.states.nodes) for entry in batch.entries)
        in_step.append((states.num_slots - states.obtainable, between[-1] + reserved))
        return verify(batch, trees)

    worker.target.verify = watched
    rng = np.random.default_rng(0)
    for _ in range(_RUNNING):
        prompt = rng.integers(3, SMALL.vocab_size, 20).tolist()
        engine.submit(prompt, SamplingParams(temperature=0, max_new_tokens=_TOKENS))
    between, per_request = [0], []
    while engine.has_unfinished:
        engine.step()
        between.append(states.num_slots - states.obtainable)
        if engine.last_step.running:
            per_request.append(between[-1] * slot_bytes / engine.last_step.running)
    engine.check_integrity()
    own = states_bytes(folder)
    held, reason = max(in_step)
    return [
        row("a state of all layers", own / 2**20, "MiB"),
        row("held by a request between steps", max(per_request) / own, "states", 1.0, at_most=True),
        row("held in the largest step", held, "slots"),
        row("of them, per committed state, run end and node", held / reason, "slots", 1.0,
            at_most=True),
        row("left when all have ended", between[-1], "slots", 0.0, at_most=True),
    ]  # fmt: skip
