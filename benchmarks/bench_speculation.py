"""NGRAM against plain decoding within the engine: the same tokens, so times compare directly.

Every measured pass starts from an empty corpus (the second-epoch workload: from one that has seen
the first epoch, drawn with other seeds), and passes with and without speculation alternate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_corpus import corpus_of
from table import Row, finish, parser, row
from workloads import OPEN_PROMPTS, REPETITIVE_PROMPTS, chat, reasoning_prompts

from rollout import RolloutEngine, SamplingParams
from rollout.engine.metrics import EngineMetrics


@dataclass(kw_only=True, slots=True)
class Workload:
    name: str
    prompts: list[Any]
    params: SamplingParams
    batch: int
    bar: float
    first_epoch: SamplingParams | None = None  # run, untimed, before the timed pass


def workloads() -> list[Workload]:
    repetitive = [chat(text) for text in REPETITIVE_PROMPTS]
    open_ended = [chat(text) for text in OPEN_PROMPTS]
    tasks = reasoning_prompts(6)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=192)
    warm = SamplingParams(temperature=0.7, max_new_tokens=128, n=4, seed=1)
    again = SamplingParams(temperature=0.7, max_new_tokens=128, n=4, seed=2)
    hot = SamplingParams(temperature=1.0, max_new_tokens=96, seed=3)
    return [
        Workload(name="greedy, repetitive, batch 1", prompts=repetitive, params=greedy, batch=1,
                 bar=2.0),
        Workload(name="second epoch, T 0.7, batch 1", prompts=tasks, params=again, batch=1,
                 bar=1.2, first_epoch=warm),
        Workload(name="second epoch, T 0.7, batch 4", prompts=tasks, params=again, batch=4,
                 bar=1.05, first_epoch=warm),
        Workload(name="open-ended, T 1.0, batch 1", prompts=open_ended, params=hot, batch=1,
                 bar=0.97),
        Workload(name="open-ended, T 1.0, batch 8", prompts=open_ended * 2, params=hot, batch=8,
                 bar=0.97),
    ]  # fmt: skip


def timed_pass(engine: RolloutEngine, work: Workload) -> tuple[float, list[list[int]]]:
    engine.flush_cache()
    if work.first_epoch is not None and engine.worker.draft_corpus is not None:
        engine.generate(work.prompts, work.first_epoch)
    engine.flush_cache()
    engine.reset_metrics()
    started = time.perf_counter()
    rollouts = engine.generate(work.prompts, work.params)
    return time.perf_counter() - started, [r.token_ids for r in rollouts]


def shares(metrics: EngineMetrics) -> str:
    parts = ("forward", "draft", "sample", "schedule")
    return ", ".join(f"{p} {getattr(metrics, p + '_ms') / metrics.total_ms:.1%}" for p in parts)


def measure(path: Path, work: Workload, repeats: int) -> list[Row]:
    plain = RolloutEngine.from_pretrained(path, spec="none", max_running=work.batch)
    ngram = RolloutEngine.from_pretrained(path, spec="ngram", max_running=work.batch)
    for engine in (plain, ngram):
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))  # warm
    without: list[float] = []
    with_ngram: list[float] = []
    for _ in range(repeats):
        seconds, expected = timed_pass(plain, work)
        without.append(seconds)
        corpus_of(ngram).reset()
        seconds, tokens = timed_pass(ngram, work)
        with_ngram.append(seconds)
        if tokens != expected:
            raise SystemExit(f"{work.name}: speculation changed the tokens")
    count = sum(map(len, expected))
    metrics = ngram.metrics()
    print(f"{work.name}: ngram {shares(metrics)}; none {shares(plain.metrics())}", flush=True)
    outside = 1 - plain.metrics().forward_ms / plain.metrics().total_ms
    outside_ngram = 1 - metrics.forward_ms / metrics.total_ms
    rows = [
        row(f"{work.name}: plain", count / min(without), "tokens/s"),
        row(f"{work.name}: ngram", count / min(with_ngram), "tokens/s"),
        row(f"{work.name}: accept length", metrics.accept_length, "tokens"),
        row(f"{work.name}: speedup", min(without) / min(with_ngram), "x", work.bar),
    ]
    if work.batch == 8:
        rows += [
            row("outside the forward, batch 8, plain", outside, "share", 0.10, at_most=True),
            row("outside the forward, batch 8, ngram", outside_ngram, "share", 0.10, at_most=True),
        ]
    return rows


def price_of_exactness(path: Path, work: Workload, repeats: int) -> list[Row]:
    """Seconds with exact=true over seconds with exact=false, plain decoding; 1 is free."""
    best: dict[bool, float] = {}
    engines = {
        exact: RolloutEngine.from_pretrained(path, spec="none", max_running=work.batch, exact=exact)
        for exact in (False, True)
    }
    for _ in range(repeats + 1):
        for exact, engine in engines.items():
            seconds, _ = timed_pass(engine, work)
            best[exact] = min(seconds, best.get(exact, seconds))
    ratio = best[True] / best[False]
    return [row(f"price of exact=true, batch {work.batch}", ratio, "x", 1.1, at_most=True)]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=2)
    arguments.add_argument("--only", help="run the workloads whose name contains this")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for work in workloads():
        if options.only is None or options.only in work.name:
            rows += measure(options.model, work, options.repeats)
    for work in workloads():
        if options.only is None and work.name.startswith("open-ended"):
            rows += price_of_exactness(options.model, work, options.repeats)
    finish(f"speculation, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
