"""The budget beside plain decoding, where drafts cannot pay and where they do."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine_corpus import corpus_of
from table import Row, row
from workloads import OPEN_PROMPTS, chat, reasoning_prompts

from budget_bench.entrants import (
    BUDGET,
    PLAIN,
    make_engine,
    next_policy,
    read_weights,
    warm_up,
)
from budget_bench.race import Pass, race, rotated, speedup
from budget_bench.report import describe, pairs
from rollout import RolloutEngine, SamplingParams
from rollout.types import Prompt


@dataclass(kw_only=True, slots=True)
class Workload:
    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    batch: int
    bar: float
    epochs_before: int = 0  # run, untimed and with other seeds, before each timed pass


def workloads() -> list[Workload]:
    open_ended = [chat(text) for text in OPEN_PROMPTS]
    tasks = reasoning_prompts(8)
    hot = SamplingParams(temperature=1.0, max_new_tokens=80, seed=100)
    warm = SamplingParams(temperature=0.7, max_new_tokens=96, n=4, seed=200)
    works = [
        Workload(
            name=f"open prompts, T 1.0, batch {batch}",
            prompts=(open_ended * 4)[: max(3, 2 * batch)],
            params=hot,
            batch=batch,
            bar=0.98,
        )
        for batch in (1, 4, 8, 16)
    ]
    works += [
        Workload(
            name=f"second epoch, T 0.7, batch {batch}",
            prompts=tasks[:count],
            params=warm,
            batch=batch,
            bar=bar,
            epochs_before=1,
        )
        for batch, count, bar in ((1, 2, 1.25), (4, 4, 1.1), (16, 8, 1.0))
    ]
    return works


def decoding_rows(model: Path, work: Workload, repeats: int) -> list[Row]:
    """Each repeat draws with seeds of its own, from the corpus as the epochs before left it.

    The corpus alone goes back there: the cost curve, the gate, the corrections of drafts and the
    lengths of rollouts are learned on from repeat to repeat, as in a longer run.
    """
    engines = {
        PLAIN: make_engine(model, work.batch, None),
        BUDGET: make_engine(model, work.batch, {}),
    }
    for engine in engines.values():
        warm_up(engine, work.prompts[: 2 * work.batch])
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        _train(engines, model, work)
        corpus_of(engines[BUDGET]).save(corpus)
        for repeat in range(repeats):
            corpus_of(engines[BUDGET]).load(corpus)
            params = replace(work.params, seed=work.params.seed + repeat)
            passes = {
                name: Pass(engines[name], work.prompts, params)
                for name in rotated(list(engines), repeat)
            }
            race(list(passes.values()))
            for name, own in passes.items():
                seconds[name].append(own.seconds)
    metrics = {name: engine.metrics() for name, engine in engines.items()}  # of the last repeat
    print(f"{work.name}: {describe(metrics)}; {pairs(seconds[PLAIN], seconds[BUDGET])}", flush=True)
    count = metrics[PLAIN].generated_tokens
    return [
        row(f"{work.name}: plain", count / seconds[PLAIN][-1], "tokens/s"),
        row(f"{work.name}: budget", count / seconds[BUDGET][-1], "tokens/s"),
        row(f"{work.name}: accept length", metrics[BUDGET].accept_length, "tokens"),
        row(f"{work.name}: speedup", speedup(seconds[PLAIN], seconds[BUDGET]), "x", work.bar),
    ]


def _train(engines: dict[str, RolloutEngine], model: Path, work: Workload) -> None:
    """The epochs before: the budget's engine lives through them, the plain one learns nothing."""
    weights = read_weights(model) if work.epochs_before else {}
    for epoch in range(work.epochs_before):
        engines[BUDGET].generate(work.prompts, replace(work.params, seed=epoch))
        for engine in engines.values():
            next_policy(engine, weights, epoch + 1)
