"""The verdict on each run: how fast it was, what drafts gained, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from rollout.engine.speedup import HALF_INTERVAL, MIN_STEPS, Saving
from rollout.report.key_figures import (
    UNKNOWN,
    accept_length,
    count,
    counter,
    decimal,
    percent,
    seconds,
    tokens_per_second,
)
from rollout.report.run import Run, number, total

_PHASES = {
    "forward": "forward_ms",
    "drafting": "draft_ms",
    "sampling": "sample_ms",
    "scheduling": "schedule_ms",
}


@dataclass(frozen=True, slots=True)
class Share:
    name: str
    begin: float  # of 1
    share: float  # of 1

    @property
    def label(self) -> str:
        """The part's name and share."""
        return f"{self.name} {percent(self.share)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run, as both the page and the terminal show it."""

    name: str  # of the run; empty where there is one alone
    speedup: str  # short: a factor with its error
    sentence: str
    facts: list[tuple[str, str]]
    shares: list[Share]  # that add up to 1; none where no time is known


def verdicts(runs: Sequence[Run]) -> list[Verdict]:
    return [_verdict(run, runs[0]) for run in runs]


def _verdict(run: Run, first: Run) -> Verdict:
    saving = saving_of(run)
    speedup, sentence = _speedup(run, saving)
    rate, first_rate = tokens_per_second(run), tokens_per_second(first)
    if run is not first and rate and first_rate:
        sentence += (
            f" {rate / first_rate:.2f}x the tokens/s of {first.name}, which has no interval: it is "
            "one run of each."
        )
    return Verdict(
        name=run.name,
        speedup=speedup,
        sentence=sentence,
        facts=[
            ("tokens/s", count(rate)),
            ("speedup", speedup),
            ("accept length", decimal(accept_length(run), 2)),
            ("rollouts", count(run.num_rollouts)),
            ("tokens", count(counter(run, "generated_tokens"))),
            ("time", seconds(run.seconds)),
        ],
        shares=time_shares(run),
    )


def saving_of(run: Run) -> Saving | None:
    variance = number(run.totals.get("gain_variance_ms2"))
    saved = number(run.totals.get("gain_ms")) / 1e3
    compared = [number(run.totals.get(name)) for name in ("plain_forecasts", "drafting_forecasts")]
    if min(compared) < MIN_STEPS:
        return Saving(saved, math.inf, run.seconds)
    error = HALF_INTERVAL * math.sqrt(variance) / 1e3 if variance >= 0 else math.nan
    if not math.isfinite(saved + error):
        known = np.flatnonzero(
            np.isfinite(run.steps["saved_seconds"] + run.steps["saved_error_seconds"])
        )
        if not len(known):
            return None
        saved, error = (
            float(run.steps[name][known[-1]]) for name in ("saved_seconds", "saved_error_seconds")
        )
    return Saving(saved / run.num_replicas, error / run.num_replicas, run.seconds)


def _speedup(run: Run, saving: Saving | None) -> tuple[str, str]:
    if not counter(run, "drafted"):
        return UNKNOWN, "Nothing was drafted: this is plain decoding."
    if saving is None or number(run.totals.get("forecast_steps")) == 0:
        return UNKNOWN, (
            "The speedup was not measured: spec.budget=learned compares drafting steps with plain "
            "ones."
        )
    sentence = str(saving)
    return saving.factor, f"{sentence[0].upper()}{sentence[1:]}."


def time_shares(run: Run) -> list[Share]:
    known = {name: _milliseconds(run, field) for name, field in _PHASES.items()}
    in_steps = max(_milliseconds(run, "total_ms"), sum(known.values()))
    known["rest of steps"] = in_steps - sum(known.values())
    known["between steps"] = max(run.seconds * run.num_replicas * 1e3 - in_steps, 0.0)
    whole = sum(known.values())
    shares: list[Share] = []
    for name, milliseconds in known.items() if whole > 0 else ():
        begin = shares[-1].begin + shares[-1].share if shares else 0.0
        shares.append(Share(name, begin, milliseconds / whole))
    return shares


def _milliseconds(run: Run, field: str) -> float:
    known = number(run.totals.get(field))
    return max(known, 0.0) if known == known else total(run.steps[field]) * run.steps_per_line


def print_verdicts(console: Console, found: Sequence[Verdict]) -> None:
    for verdict in found:
        if verdict.name:
            console.print(Text(verdict.name, style="bold"))
        console.print(Text(verdict.sentence))
        facts = [f"{name} {value}" for name, value in verdict.facts if name != "speedup"]
        console.print(Text("   ".join(facts)))
        if verdict.shares:
            console.print(Text("   ".join(share.label for share in verdict.shares)))
