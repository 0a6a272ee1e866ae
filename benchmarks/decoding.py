"""An engine of random weights whose requests decode side by side, plainly or with random drafts.

Draft nodes are trees of random tokens, so hardly any is accepted: a step costs what verifying them
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from harness.shapes import send_random_weights
from harness.timing import wall_seconds
from numpy.typing import NDArray

from rollout import Request, Rollout, RolloutEngine, SamplingParams
from rollout.config import EngineConfig, LoadFormat, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.types import Batch, DraftTrees
from spec_workers.draft_tree import only_roots, spread
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker

SETTLING = 6
"""Steps before those that are timed: kernels compile, graphs are captured."""

TIMED = 30

STEP_TOKENS = 2048
"""Prompt tokens of one step."""


def draft_trees(parents_B: Sequence[Sequence[int]], tokens_N: NDArray[np.int32]) -> DraftTrees:
    """The trees with these parents, one for each entry."""
    parents: list[int] = []
    depths, masks = [], []
    for own in parents_B:
        own_depths, own_masks = [0], [1]
        for node, parent in enumerate(own, start=1):
            own_depths.append(own_depths[parent] + 1)
            own_masks.append(own_masks[parent] | 1 << node)
        parents += own
        depths += own_depths[1:]
        masks += own_masks[1:]
    return DraftTrees(
        offsets_B1=np.cumsum([0, *map(len, parents_B)]),
        tokens_N=tokens_N,
        parents_N=np.array(parents, dtype=np.int32),
        depths_N=np.array(depths, dtype=np.int32),
        masks_N=np.array(masks, dtype=np.uint64),
        probs_N=np.full(len(parents), 0.5, dtype=np.float32),
        sources_N=np.zeros(len(parents), dtype=np.uint8),
    )


class RandomTrees(SpecWorker):
    """Proposes a tree of random tokens for every request: a chain with a sibling at each node."""

    def __init__(self, target: TargetWorker, num_nodes: int) -> None:
        super().__init__(target)
        self._num_nodes = num_nodes
        self._rng = np.random.default_rng(0)

    @property
    def max_draft_tokens(self) -> int:
        return self._num_nodes

    def propose(self, batch: Batch, floors_B: NDArray[np.float64]) -> DraftTrees:
        drafting = [b for b, entry in enumerate(batch.entries) if len(entry.draft_slots)]
        if not drafting:
            return only_roots(len(batch.entries))
        counts = [len(batch.entries[b].draft_slots) for b in drafting]
        # Two children under every odd node.
        parents = [[max(0, node - 2 + node % 2) for node in range(count)] for count in counts]
        tokens_N = self._rng.integers(0, self.vocab_size, sum(counts), dtype=np.int32)
        return spread(draft_trees(parents, tokens_N), drafting, len(batch.entries))


def longest_response(batch: int, context: int) -> int:
    """A number of tokens at which no request ends while the prompts of others are prefilled."""
    return 4 * (SETTLING + TIMED) + 2 * batch * context // STEP_TOKENS


def slots_wanted(batch: int, context: int, nodes: int) -> int:
    """KV slots that these requests may come to hold while they are timed."""
    return batch * (context + longest_response(batch, context) + nodes)


def open_engine(
    folder: Path, batch: int, context: int, *, device: str, exact: bool, nodes: int
) -> RolloutEngine:
    """An engine for up to ``batch`` requests of ``context`` tokens that decode together."""
    config = EngineConfig(
        model=ModelConfig(path=str(folder), device=device, load_format=LoadFormat.dummy),
        memory=MemoryConfig(
            max_kv_tokens=2 * slots_wanted(batch, context, nodes),
            prefix_cache=False,
            kv_fraction=0.9,  # nobody else is on the device
        ),
        scheduler=SchedulerConfig(
            max_running=batch, max_step_tokens=STEP_TOKENS, chunk_len=STEP_TOKENS
        ),
        exact=exact,
    )
    engine = RolloutEngine(config, RandomTrees(TargetWorker(config), nodes))
    send_random_weights(engine)
    return engine


def start(engine: RolloutEngine, batch: int, context: int) -> list[Request]:
    """Requests that decode from about ``context`` tokens on, their steps warm.

    Raises RuntimeError where there is no room for all of them at once.
    """
    slots = engine.status().kv_slots
    if (wanted := slots_wanted(batch, context, engine.worker.max_draft_tokens)) > slots:
        raise RuntimeError(f"no room: {batch} requests want {wanted} of {slots} KV slots")
    rng = np.random.default_rng(1)
    params = SamplingParams(max_new_tokens=longest_response(batch, context), ignore_eos=True)
    prompt_len = context - SETTLING - TIMED
    requests = [
        engine.submit(
            rng.integers(0, engine.vocab_size, prompt_len).tolist(), params, prompt_index=index
        )
        for index in range(batch)
    ]
    step_seconds(engine, batch)
    while engine.last_step.sampling < batch:
        step_seconds(engine, batch)
    for _ in range(SETTLING):
        step_seconds(engine, batch)
    return requests


def step_seconds(engine: RolloutEngine, batch: int) -> float:
    """Seconds of one step. Raises RuntimeError where a request ended in it."""
    ended: list[Rollout] = []
    seconds = wall_seconds(lambda: ended.extend(engine.step()))
    if ended or engine.last_step.running > batch:
        reasons = [rollout.finish_reason.value for rollout in ended]
        raise RuntimeError(f"of {batch} requests that were to run on, some ended: {reasons}")
    return seconds


def stop(engine: RolloutEngine, requests: Sequence[Request]) -> None:
    """Abort these requests and drop their cached prefixes: nothing runs afterwards."""
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
    engine.flush_cache()
