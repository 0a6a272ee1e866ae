"""Reward, certainty and accept length of runs of grpo_deepspeed.py, and whether pairs are equal.

    python examples/plot_grpo.py runs/*.jsonl --output grpo.png

Runs of one seed are compared step by step: rewards, digests of tokens and logprobs, last weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run's log. A run that was cut short has the records up to there."""

    settings: Record
    steps: list[Record]
    held_out: list[Record]
    weights: str | None  # digest of the last ones

    @classmethod
    def read(cls, path: Path) -> Run:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        by_event: dict[str, list[Record]] = {}
        for record in records:
            by_event.setdefault(record.pop("event"), []).append(record)
        end = by_event.get("end")
        return cls(
            by_event["start"][0],
            by_event.get("step", []),
            by_event.get("held out", []),
            end[0]["weights"] if end else None,
        )

    @property
    def name(self) -> str:
        return f"seed {self.settings['seed']}, {self.settings['spec']}"

    def mean(self, field: str, first: int, last: int | None) -> float:
        return fmean(step[field] for step in self.steps[first:last])


def differences(one: Run, other: Run) -> tuple[int, list[int]]:
    """The number of steps that both have, and those that differ in any token, logprob or reward."""
    pairs = list(zip(one.steps, other.steps, strict=False))
    fields = ("digest", "reward", "nll", "logprob_gap")
    return len(pairs), [
        a["step"] for a, b in pairs if any(a[field] != b[field] for field in fields)
    ]


def print_table(runs: list[Run], window: int) -> None:
    print(
        f"| run | steps | reward, first {window} | reward, last {window} | majority answer "
        "| held out, sampled | held out, greedy | accept length, first and last |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for run in runs:
        cells = [
            run.name,
            str(len(run.steps)),
            f"{run.mean('reward', 0, window):.2f}",
            f"{run.mean('reward', -window, None):.2f}",
            f"{run.mean('majority_reward', 0, None):.2f}",
            *(
                " -> ".join(f"{record[field]:.2f}" for record in run.held_out if field in record)
                for field in ("sampled_reward", "greedy_reward")
            ),
            f"{run.mean('accept_length', 0, window):.2f}, "
            f"{run.mean('accept_length', -window, None):.2f}",
        ]
        print("| " + " | ".join(cells) + " |")


def print_comparison(runs: list[Run]) -> None:
    for one, other in itertools.combinations(runs, 2):
        if one.settings["seed"] != other.settings["seed"]:
            continue
        count, steps = differences(one, other)
        weights = "not both written" if None in (one.weights, other.weights) else (
            "equal" if one.weights == other.weights else "different"
        )  # fmt: skip
        print(
            f"{one.name} and {other.settings['spec']}: {count} steps, "
            f"{len(steps)} of them different{f' (from {steps[0]})' if steps else ''}; "
            f"last weights {weights}"
        )


def plot(runs: list[Run], window: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    reward, nll, accept_length = figure.subplots(1, 3)
    reward.set(title="reward", xlabel="step", ylabel="mean of the step's rollouts", ylim=(0, 1))
    nll.set(title="certainty", xlabel="step", ylabel="-logprob per token (nats)")
    accept_length.set(title="accept length", xlabel="step", ylabel="tokens per target forward")
    colors = {seed: f"C{i}" for i, seed in enumerate(sorted({r.settings["seed"] for r in runs}))}
    for run in runs:
        style = "-" if run.settings["spec"] == "ngram" else ":"
        color = colors[run.settings["seed"]]
        numbers = [step["step"] for step in run.steps]
        smooth = [
            run.mean("reward", max(0, index + 1 - window), index + 1)
            for index in range(len(run.steps))
        ]
        thick = {"linestyle": style, "color": color, "linewidth": 3 if style == ":" else 1.2}
        reward.plot(numbers, smooth, label=run.name, **thick)
        if style == "-":
            raw = [step["reward"] for step in run.steps]
            reward.plot(numbers, raw, ".", color=color, alpha=0.35)
        for axes, field in ((nll, "nll"), (accept_length, "accept_length")):
            axes.plot(numbers, [step[field] for step in run.steps], **thick)
    majority = fmean(run.mean("majority_reward", 0, None) for run in runs)
    reward.axhline(majority, color="grey", linestyle="--", label="most common answer")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, nargs="+", help="of grpo_deepspeed.py")
    parser.add_argument("--output", type=Path, default=Path("runs/grpo.png"), help="a picture")
    parser.add_argument("--window", type=int, default=5, help="steps of a mean")
    args = parser.parse_args()
    runs = [run for run in map(Run.read, args.logs) if run.steps]
    print_table(runs, args.window)
    print_comparison(runs)
    plot(runs, args.window, args.output)


if __name__ == "__main__":
    main()
