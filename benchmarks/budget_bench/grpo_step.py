"""One step of group-relative policy optimisation: few prompts, many samples, a few stragglers.

The step is over when its last rollout is, so the tail in which few requests run counts as much as
the beginning in which all do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from engine_corpus import corpus_of
from table import Row, row
from workloads import chat

from budget_bench.entrants import (
    BUDGET,
    PLAIN,
    fixed_options,
    make_engine,
    next_policy,
    read_weights,
    warm_up,
)
from budget_bench.race import Pass, race, rotated, speedup
from budget_bench.report import describe, pairs, spread
from rollout import SamplingParams
from rollout.types import Prompt

NAME = "GRPO step, third epoch, T 0.5"

_FIXED = (2, 4, 8, 16)  # draft tokens; none at all is plain decoding
_PARAMS = SamplingParams(temperature=0.5, max_new_tokens=512, n=8, seed=300)
_TASKS = ("gsm_symbolic", "calendar_arithmetic", "leg_counting", "time_intervals")
_MAX_RUNNING = 32  # all samples at once
_VERSION = 2  # two epochs and their updates came before


def grpo_rows(model: Path, repeats: int) -> list[Row]:
    """The budget beside plain decoding and beside fixed numbers of draft tokens.

    The two epochs before are the budget's own; every drafting engine then has that corpus, in each
    repeat as those epochs left it.
    """
    fixed = {f"fixed {count}": fixed_options(count) for count in _FIXED}
    options: dict[str, dict[str, Any] | None] = {PLAIN: None, BUDGET: {}, **fixed}
    engines = {name: make_engine(model, _MAX_RUNNING, own) for name, own in options.items()}
    prompts, weights = _prompts(), read_weights(model)
    for engine in engines.values():
        warm_up(engine, prompts * 8)
    for epoch in range(_VERSION):
        engines[BUDGET].generate(prompts, replace(_PARAMS, seed=epoch))
        next_policy(engines[BUDGET], weights, epoch + 1)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus_of(engines[BUDGET]).save(corpus)
        for name in set(engines) - {BUDGET}:
            next_policy(engines[name], weights, _VERSION)
        for repeat in range(repeats):
            for name in set(engines) - {PLAIN}:
                corpus_of(engines[name]).load(corpus)
            params = replace(_PARAMS, seed=_PARAMS.seed + repeat)
            passes = {
                name: Pass(engines[name], prompts, params)
                for name in rotated(list(engines), repeat)
            }
            race(list(passes.values()))
            for name, own in passes.items():
                seconds[name].append(own.seconds)
            lengths = [len(output) for output in passes[PLAIN].outputs.values()]
            print(f"{NAME}: {spread(lengths, params.max_new_tokens)}", flush=True)
    metrics = {name: engine.metrics() for name, engine in engines.items()}  # of the last repeat
    print(f"{NAME}: {describe(metrics)}; {pairs(seconds[PLAIN], seconds[BUDGET])}", flush=True)
    best = best_fixed(seconds, [PLAIN, *fixed])
    rows = [row(f"{NAME}: {name}", speedup(seconds[PLAIN], seconds[name]), "x") for name in fixed]
    return [
        row(f"{NAME}: plain", median(seconds[PLAIN]), "s"),
        row(f"{NAME}: accept length", metrics[BUDGET].accept_length, "tokens"),
        *rows,
        row(f"{NAME}: speedup", speedup(seconds[PLAIN], seconds[BUDGET]), "x", 1.25),
        row(
            f"{NAME}: over the best fixed, {best}",
            speedup(seconds[best], seconds[BUDGET]),
            "x",
            1.0,
        ),
    ]


def best_fixed(seconds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The one of the least median time. Not the least of every repeat: that would be luck."""
    return min(names, key=lambda name: median(seconds[name]))


def _prompts() -> list[Prompt]:
    """Tasks whose answers differ in length between and within them."""
    import reasoning_gym

    prompts: list[Prompt] = []
    for task in _TASKS:
        dataset: Any = reasoning_gym.create_dataset(task, size=1, seed=11)
        prompts.append(chat(dataset[0]["question"]))
    return prompts
