"""Question: is speculation with its learned budget never slower than plain decoding, faster where
drafts pay, and as fast as the best fixed number of draft tokens?

    python benchmarks/bench_budget.py [--only "open prompts, ngram"] [--pairs 16]

Two engines decode the same work, one with drafts and one without, a step of this and a step of
that, and change sides from stretch to stretch (`rollout/offline/compare`). A row with a bar is the
lower end of the speedup's 95 % interval. On two idle cores the parts take 8 minutes for the open
prompts of each kind of drafts (eagle and hybrid where --draft is there), 1 to 2 for each second
epoch, and 5 for the GRPO step.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.command import Command, Part, Parts
from harness.engines import forget, hold, make_engine, warm_up
from harness.prompts import OPEN_PROMPTS, chat, reasoning_prompts
from harness.rows import Row, row

from rollout import RolloutEngine, SamplingParams
from rollout.offline.compare.comparison import Comparison, Work
from rollout.offline.compare.paired_times import PairedTimes
from spec_workers.budget import FixedBudget
from spec_workers.options import SpecOptions
from spec_workers.step.learning import StepLearning

GRPO = "GRPO step, third epoch, T 0.5"

_BATCHES = (32, 16, 8, 4, 1)
"""From wide to narrow, as a batch runs empty: the gate looks anew at half the width."""

_WARMUP = 5  # pairs, within which the gate closes
_FIXED = (2, 4, 8, 16)  # draft tokens


def rows_of(name: str, times: PairedTimes, bar: float) -> Iterator[Row]:
    yield row(f"{name}: speedup", times.speedup, "x")
    yield row(f"{name}: at least", times.interval()[0], "x", bar)


def open_work(options: argparse.Namespace, batch: int, max_new_tokens: int, pairs: int) -> Work:
    """Open prompts at temperature 1 hardly repeat themselves: the hardest case for drafts."""
    prompts = [chat(text) for text in OPEN_PROMPTS] * (2 * batch * pairs)
    params = SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=100)
    return Work(prompts=prompts[: 2 * batch * pairs], params=params, width=batch, rounds=2)


def warm_engines(model: Path, spec: str, draft: Path) -> list[RolloutEngine]:
    """Two engines alike, whose first forwards of each shape, which are slow, are behind them."""
    spec_options = {} if spec == "ngram" else {"draft_path": str(draft)}
    engines = [
        make_engine(model, spec, _BATCHES[0], spec_options, kv_bytes=512 << 20) for _ in range(2)
    ]
    for engine in engines:
        for batch in _BATCHES:
            warm_up(engine, [chat(text) for text in OPEN_PROMPTS * 4][:batch], max_tokens=24)
    return engines


def open_rows(options: argparse.Namespace, spec: str) -> Iterator[Row]:
    engines = warm_engines(options.model, spec, options.draft)
    for batch in _BATCHES:
        for engine in engines:
            forget(engine)
        name = f"open prompts, {spec}, batch {batch}"
        work = open_work(options, batch, options.tokens, options.pairs + _WARMUP)
        times = hold(Comparison(*engines), work, name)
        yield from rows_of(name, times, 0.98)


def teach(engines: Sequence[RolloutEngine], work: Work, epochs: int) -> None:
    for epoch in range(epochs):
        Comparison(*engines).teach(replace(work.of_epoch(epoch), width=engines[0].max_running))
        for engine in engines:
            # Training that changes nothing: drafts are older from now on.
            engine.update_weights_from_disk(engine.config.model.path, weight_version=epoch + 1)


def epoch_rows(options: argparse.Namespace, batch: int, bar: float) -> Iterator[Row]:
    params = SamplingParams(temperature=0.7, max_new_tokens=options.tokens, n=4, seed=200)
    prompts = reasoning_prompts(math.ceil(options.pairs * batch / params.n))
    work = Work(prompts=prompts, params=params, width=batch)
    engines = warm_engines(options.model, "ngram", options.draft)
    teach(engines, work, 1)
    name = f"second epoch, T 0.7, batch {batch}"
    yield from rows_of(name, hold(Comparison(*engines), work.of_epoch(1), name), bar)


@contextmanager
def drafting(corpus: Path, fixed: int | None, engine: RolloutEngine) -> Iterator[None]:
    """Draft from the saved corpus, a fixed number of tokens or as the learned budget says."""
    worker: Any = engine.worker
    worker.corpus.load(corpus)  # no rollout may be drafted from itself
    own = worker.budget, worker._learning, worker._num_draft_tokens
    if fixed is not None:
        worker.budget = FixedBudget(SpecOptions.min_probability)
        worker._learning = StepLearning(worker.budget, is_deferred=False)
        worker._num_draft_tokens = fixed
    try:
        yield
    finally:
        worker.budget, worker._learning, worker._num_draft_tokens = own


def grpo_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Few prompts, many samples, a few stragglers. The step is over when its last rollout is, so
    the tail in which few requests run counts as much as the beginning in which all do."""
    tasks = ("gsm_symbolic", "calendar_arithmetic", "leg_counting", "time_intervals")
    params = SamplingParams(temperature=0.5, max_new_tokens=options.step_tokens, n=8, seed=300)
    prompts = [reasoning_prompts(1, task)[0] for task in tasks]
    step = Work(prompts=prompts, params=params, width=32)
    engines = warm_engines(options.model, "ngram", options.draft)
    teach(engines, step, 2)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        worker: Any = engines[0].worker
        worker.corpus.save(corpus)

        def against(fixed: int | None, pairs: int) -> PairedTimes:
            """The learned budget; without a fixed number, against plain decoding."""
            learned = partial(drafting, corpus, None)
            if fixed is None:
                comparison = Comparison(*engines, speculation=learned)
            else:
                fixed_number = partial(drafting, corpus, fixed)
                comparison = Comparison(*engines, baseline=fixed_number, speculation=learned)
            work = replace(step.of_epoch(2), prompts=prompts * pairs)  # a step in each pair
            return hold(comparison, work, f"{GRPO}, against {fixed or 'plain decoding'}")

        yield from rows_of(GRPO, against(None, options.pairs), 1.25)
        tried = {fixed: against(fixed, min(3, options.pairs)).speedup for fixed in _FIXED}
        best = min(tried, key=tried.__getitem__)
        yield from rows_of(f"{GRPO}, over {best} draft tokens", against(best, options.pairs), 1.0)


def parts(options: argparse.Namespace) -> Parts:
    specs = ["ngram", *(["eagle", "hybrid"] if options.draft.exists() else [])]
    found: dict[str, Part] = {
        f"open prompts, {spec}": partial(open_rows, options, spec) for spec in specs
    }
    for batch, bar in ((1, 1.25), (4, 1.1), (16, 1.0)):
        found[f"second epoch, batch {batch}"] = partial(epoch_rows, options, batch, bar)
    found[GRPO] = partial(grpo_rows, options)
    return found


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(2)
    command.option("--draft", Path("drafts/eagle3"), type=Path, help="an EAGLE draft of the target")
    command.option("--pairs", 16, quick=1, help="stretches of each row")
    command.option("--tokens", 48, quick=4, help="most of a rollout")
    command.option("--step-tokens", 128, quick=8, help="the same, of a GRPO step")
    return command


if __name__ == "__main__":
    make_command().run("draft budget, {threads} threads", parts)
