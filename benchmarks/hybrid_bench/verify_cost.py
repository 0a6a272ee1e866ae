"""What verifying a tree costs beside one node."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from table import Row, row

from hybrid_bench.engines import random_engine
from hybrid_bench.hybrid_shapes import REFERENCE, write_hybrid_config
from rollout import SamplingParams
from rollout.types import Batch, DraftTrees
from spec_workers.draft_tree import only_roots

_CONTEXT = 256
PARENTS = {1: [], 8: [0, 0, 1, 1, 2, 3, 3]}  # by nodes of the tree, the root counted


def verify_rows(folder: Path, repeats: int) -> list[Row]:
    """One request; trees of one node and of eight take turns, and ratios are of neighbours."""
    write_hybrid_config(folder, REFERENCE)
    engine = random_engine(folder, max_running=1, kv_bytes=1 << 29)
    worker: Any = engine.worker
    target, memory = worker.target, worker.memory
    prompt = np.random.default_rng(0).integers(3, REFERENCE.vocab_size, _CONTEXT).tolist()
    engine.submit(prompt, SamplingParams(max_new_tokens=64, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.scheduler._max_draft_tokens = lambda: 7
    batch = engine.scheduler.schedule()
    milliseconds: dict[int, list[float]] = {1: [], 8: []}
    for turn in range(repeats + 2):
        for nodes, parents in PARENTS.items():
            elapsed = _verify_ms(target, batch, tree(parents) if parents else only_roots(1))
            if turn >= 2:  # the first ones warm up
                milliseconds[nodes].append(elapsed)
    memory.drop_steps()
    ratios = [eight / one for one, eight in zip(*milliseconds.values(), strict=True)]
    return [
        row("verify of 1 node", median(milliseconds[1]), "ms"),
        row("verify of 8 nodes", median(milliseconds[8]), "ms"),
        row("verify of 8 nodes beside 1", median(ratios), "x", 2.0, at_most=True),
    ]


def _verify_ms(target: Any, batch: Batch, trees: DraftTrees) -> float:
    started = time.perf_counter()
    target.verify(batch, trees)
    return (time.perf_counter() - started) * 1e3


def tree(parents: list[int]) -> DraftTrees:
    """Of tokens 3, 4, ...: what they are does not matter."""
    depths, masks = [0], [1]
    for node, parent in enumerate(parents, start=1):
        depths.append(depths[parent] + 1)
        masks.append(masks[parent] | 1 << node)
    count = len(parents)
    return DraftTrees(
        offsets_B1=np.array([0, count]),
        tokens_N=np.arange(3, 3 + count, dtype=np.int32),
        parents_N=np.array(parents, dtype=np.int32),
        depths_N=np.array(depths[1:], dtype=np.int32),
        masks_N=np.array(masks[1:], dtype=np.uint64),
        probs_N=np.ones(count, dtype=np.float32),
        sources_N=np.zeros(count, dtype=np.uint8),
    )
