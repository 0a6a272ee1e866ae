"""Whether the corpus drafts as well for a hybrid as for a dense model that says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_bench.forced import Recording, force_target
from replay_bench.run import new_policy, steps, waves
from replay_bench.shapes import write_config
from table import Row, row
from traces import Trace

from hybrid_bench.engines import random_engine
from hybrid_bench.hybrid_shapes import SMALL, with_vocabulary, write_hybrid_config

_ACTIVE, _NODES = 64, 8


def accept_rows(folder: Path, trace: Trace, num_steps: int | None) -> list[Row]:
    """``num_steps``: of the trace, the first ones; None: all."""
    largest = max(int(tokens.max()) for tokens in (*trace.prompts, *trace.responses))
    shape = with_vocabulary(SMALL, largest + 1)
    dense = _accept_length(write_config(folder / "dense", shape), trace, num_steps)
    hybrid = _accept_length(write_hybrid_config(folder / "hybrid", shape), trace, num_steps)
    return [
        row(f"{trace.name}: accept length, dense", dense, "tokens"),
        row(f"{trace.name}: accept length, hybrid", hybrid, "tokens"),
        row(f"{trace.name}: hybrid's beside dense's", hybrid / dense, "x", 1.0),
    ]


def _accept_length(folder: Path, trace: Trace, num_steps: int | None) -> float:
    engine = random_engine(
        folder,
        "ngram",
        max_running=_ACTIVE,
        max_step_tokens=2048,
        chunk_len=2048,
        kv_bytes=1 << 30,
        spec_options={"num_draft_tokens": _NODES, "budget": "fixed", "calibration_seconds": 0},
    )
    worker: Any = engine.worker
    force_target(worker.target, Recording(trace))
    emitted = forwards = 0
    for number, wave in enumerate(waves(trace, _ACTIVE, num_steps)):
        for step in steps(engine, trace, wave):
            emitted += step.tokens
            forwards += step.forwards
        new_policy(engine, number)
    engine.check_integrity()
    return emitted / forwards
