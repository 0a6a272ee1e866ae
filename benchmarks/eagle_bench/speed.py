"""Drafts with the learned budget beside plain decoding: never slower, and what drafting costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from budget_bench.race import Pass, race, rotated, speedup
from budget_bench.report import describe
from engine_corpus import forget
from table import Row, row

from eagle_bench.entrants import PLAIN, Folders, make_engine, warm_up
from rollout import SamplingParams
from rollout.types import Prompt

NEVER_SLOWER = 0.97
"""Within what two plain engines measure of each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    name: str
    params: SamplingParams
    batch: int
    num_prompts: int


def settings(max_tokens: int) -> list[Setting]:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=max_tokens)
    warm = SamplingParams(temperature=0.7, max_new_tokens=max_tokens, seed=20)
    hot = SamplingParams(temperature=1.0, max_new_tokens=max_tokens, seed=30)
    return [
        Setting(name="greedy, batch 1", params=greedy, batch=1, num_prompts=2),
        Setting(name="T 0.7, batch 1", params=warm, batch=1, num_prompts=2),
        Setting(name="T 1.0, batch 8", params=hot, batch=8, num_prompts=12),
    ]


def speed_rows(
    folders: Folders, setting: Setting, prompts: Sequence[Prompt], repeats: int
) -> list[Row]:
    """Raises RuntimeError where drafts changed the tokens."""
    chosen = prompts[: setting.num_prompts]
    names = (PLAIN, *folders.drafting)
    engines = {name: make_engine(folders, name, setting.batch, {}) for name in names}
    for engine in engines.values():
        warm_up(engine, chosen[: 2 * setting.batch])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        for engine in engines.values():
            forget(engine)
        params = replace(setting.params, seed=setting.params.seed + repeat)
        passes = {name: Pass(engines[name], chosen, params) for name in rotated(names, repeat)}
        race(list(passes.values()))
        for name, own in passes.items():
            seconds[name].append(own.seconds)
    metrics = {name: engine.metrics() for name, engine in engines.items()}  # of the last repeat
    print(f"{setting.name}: {describe(metrics)}", flush=True)
    rows: list[Row] = []
    for name in folders.drafting:
        total, ratio = metrics[name], speedup(seconds[PLAIN], seconds[name])
        rows += [
            row(f"{setting.name}, speedup: {name}", ratio, "x", NEVER_SLOWER),
            row(f"{setting.name}, drafting: {name}", total.draft_ms / total.total_ms, "of a step"),
        ]
    return rows
