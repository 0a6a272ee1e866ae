"""One step of the whole engine beside its floor: plain, exact and fast, and with draft nodes.

A model of random weights decodes `--batch` requests at `--context` tokens each. A step is
everything: scheduling, the forward, sampling, commit. Its floor is the least time in which the
device can move the weights and keys, or do the arithmetic. Draft nodes are trees of random tokens,
so hardly any is accepted: what is measured is what verifying them costs.

    python benchmarks/bench_step.py --shape 8b --shape demo --json step.json

Without a GPU the shape is `tiny` and no bar applies.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from replay_bench.roofline import Ceilings
from replay_bench.shape_options import add_shape_options, chosen_shapes
from replay_bench.shapes import Shape, send_random_weights, write_config
from table import Row, finishing, parser, row

from rollout import RolloutEngine, SamplingParams
from rollout.config import EngineConfig, LoadFormat, MemoryConfig, ModelConfig, SchedulerConfig
from rollout.types import Batch, DraftTrees
from spec_workers.draft_tree import only_roots, spread
from spec_workers.target import TargetWorker
from spec_workers.worker import SpecWorker

SETTLING = 6
"""Steps before those that are timed: kernels compile, graphs are captured."""

TIMED = 30

STEP_TOKENS = 2048
"""Of prompts, in one step."""

BARS = {"8b": 0.7}
"""Least floor / time of a plain step."""


class RandomTrees(SpecWorker):
    """Proposes a tree of random tokens for every request: a chain with a sibling at each node."""

    def __init__(self, target: TargetWorker, num_nodes: int) -> None:
        super().__init__(target)
        self._num_nodes = num_nodes
        self._rng = np.random.default_rng(0)

    @property
    def max_draft_tokens(self) -> int:
        return self._num_nodes

    def propose(self, batch: Batch, floor: float) -> DraftTrees:
        drafting = [b for b, entry in enumerate(batch.entries) if len(entry.draft_slots)]
        if not drafting:
            return only_roots(len(batch.entries))
        counts = [len(batch.entries[b].draft_slots) for b in drafting]
        trees = [_pairs(count) for count in counts]
        total = sum(counts)
        return spread(
            DraftTrees(
                offsets_B1=np.cumsum([0, *counts]),
                tokens_N=self._rng.integers(0, self.vocab_size, total, dtype=np.int32),
                parents_N=np.concatenate([parents for parents, _, _ in trees]),
                depths_N=np.concatenate([depths for _, depths, _ in trees]),
                masks_N=np.concatenate([masks for _, _, masks in trees]),
                probs_N=np.full(total, 0.5, dtype=np.float32),
                sources_N=np.zeros(total, dtype=np.uint8),
            ),
            drafting,
            len(batch.entries),
        )


def _pairs(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parents, depths and masks of nodes 1 to ``count``: two children under every odd node."""
    parents = np.array([max(0, node - 2 + node % 2) for node in range(count)], dtype=np.int32)
    depths, masks = [0], [1]
    for node, parent in enumerate(parents.tolist(), start=1):
        depths.append(depths[parent] + 1)
        masks.append(masks[parent] | 1 << node)
    return parents, np.array(depths[1:], dtype=np.int32), np.array(masks[1:], dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    step_ms: float
    rows: int
    sampled: int
    kv_tokens: int


def longest_response(batch: int, context: int) -> int:
    """None may end while the prompts of the others are read."""
    return 4 * (SETTLING + TIMED) + 2 * batch * context // STEP_TOKENS


def _step_seconds(engine: RolloutEngine, batch: int) -> float:
    started = time.perf_counter()
    ended = engine.step()
    seconds = time.perf_counter() - started
    if ended or engine.last_step.running > batch:
        reasons = [rollout.finish_reason.value for rollout in ended]
        raise RuntimeError(f"of {batch} requests that were to run on, some ended: {reasons}")
    return seconds


def measure(engine: RolloutEngine, batch: int, context: int) -> Timed:
    """The median of ``TIMED`` steps in which all decode."""
    rng = np.random.default_rng(1)
    most_tokens = longest_response(batch, context)
    requests = [
        engine.submit(
            rng.integers(0, engine.vocab_size, context - SETTLING - TIMED).tolist(),
            SamplingParams(max_new_tokens=most_tokens, ignore_eos=True),
            prompt_index=index,
        )
        for index in range(batch)
    ]
    times = [_step_seconds(engine, batch)]
    while engine.last_step.sampling < batch:
        times = [_step_seconds(engine, batch)]
    for _ in range(SETTLING + TIMED):
        times.append(_step_seconds(engine, batch))
    last = engine.last_step
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
    engine.flush_cache()
    return Timed(
        step_ms=1e3 * statistics.median(times[1 + SETTLING :]),
        rows=last.query_tokens,
        sampled=last.sampling + last.drafted,
        kv_tokens=last.kv_used,
    )


def open_engine(
    folder: Path, options: argparse.Namespace, exact: bool, nodes: int
) -> RolloutEngine:
    most = max(options.batch)
    longest = options.context + 2 * longest_response(most, options.context)
    kv_tokens = (most + 1) * longest + 64 * most
    config = EngineConfig(
        model=ModelConfig(path=str(folder), device=options.device, load_format=LoadFormat.dummy),
        memory=MemoryConfig(max_kv_tokens=kv_tokens, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_running=most, max_step_tokens=STEP_TOKENS, chunk_len=STEP_TOKENS
        ),
        exact=exact,
    )
    worker = RandomTrees(TargetWorker(config), nodes)
    engine = RolloutEngine(config, worker)
    send_random_weights(engine, worker.target.model.destinations())
    return engine


def shape_rows(name: str, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    """Each as soon as it is measured."""
    ceilings = Ceilings.of(torch.device(options.device))
    judged = "H200" in ceilings.name
    plain: dict[int, float] = {}  # exact, by batch: milliseconds
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape)
        for exact, nodes in ((True, 0), (True, options.nodes), (False, 0)):
            engine = open_engine(Path(folder), options, exact, nodes)
            for batch in options.batch:
                timed = measure(engine, batch, options.context)
                took, label = timed.step_ms, f"{name}, batch {batch}"
                kind = f"{nodes} draft nodes each" if nodes else "exact" if exact else "fast"
                bar = 1.2 if (judged, name, batch, kind) == (True, "demo", 8, "exact") else None
                yield row(f"{label}, {kind}", took, "ms", bar, at_most=True)
                floor = ceilings.forward_ms(shape, timed.rows, timed.sampled, timed.kv_tokens)
                bar = BARS.get(name) if judged and not nodes and batch <= 32 else None
                yield row(f"{label}, {kind}: floor / time", floor / took, "ratio", bar)
                if exact and not nodes:
                    plain[batch] = took
                elif exact:
                    bar = 1.15 if judged and (name, batch, nodes) == ("8b", 8, 8) else None
                    ratio = took / plain[batch]
                    yield row(f"{label}: {kind} / none", ratio, "ratio", bar, at_most=True)
                else:
                    bar = 1.6 if judged and name == "8b" else None
                    ratio = plain[batch] / took
                    yield row(f"{label}: exact / fast", ratio, "ratio", bar, at_most=True)
            engine.close()
            del engine
            gc.collect()  # or its weights and keys stay beside the next one's


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    on_gpu = add_shape_options(arguments)
    arguments.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--context", type=int, default=4096 if on_gpu else 256)
    arguments.add_argument("--nodes", type=int, default=8, help="draft nodes of each request")
    options = arguments.parse_args(arguments_given)
    if options.context < 2 * (SETTLING + TIMED):
        arguments.error(f"--context={options.context}: must be >= {2 * (SETTLING + TIMED)}")
    if not 1 <= options.nodes <= 63:
        arguments.error(f"--nodes={options.nodes}: must be in [1, 63]")
    with finishing(f"a step on {options.device}", options.json) as rows:
        for name, shape in chosen_shapes(options, ["8b", "demo"]).items():
            rows.extend(shape_rows(name, shape, options))


if __name__ == "__main__":
    main()
