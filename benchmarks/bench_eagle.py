"""Question: how long are the drafts of an EAGLE-3 head accepted, what do they add to the
corpus, and do they never slow a step down?

    python benchmarks/bench_eagle.py --only "accept length" --threads 1
    python benchmarks/bench_eagle.py --draft drafts/eagle3

Make the draft first, with `make demo-draft`; prompts are the demo's, which it is not trained on.
Bars: EAGLE-3 2.2 tokens a forward greedily and 1.8 at temperature 0.7; a
hybrid 1.05x the better of its parts; a draft that is co-trained for some minutes 1.1x the one it
began as; speed at least 0.97x plain decoding, that of the hybrid at temperature 0.7 at least 1.7x
at batch 1 and 1.3x at batch 4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.command import Command, Part, Parts
from harness.engines import PLAIN, fixed, forget, hold, make_engine, warm_up
from harness.prompts import held_out_prompts
from harness.rows import Row, row

from rollout import RolloutEngine, SamplingParams
from rollout.offline.compare.comparison import Comparison, Work
from rollout.offline.compare.paired_times import PairedTimes
from rollout.types import Prompt

NGRAM = "ngram"
EAGLE3 = "eagle3"
HYBRID = "hybrid"
BLOCK = "block"
BLOCK_HYBRID = "block hybrid"
DRAFTING = (EAGLE3, NGRAM, HYBRID)

NUM_NODES = 8
BATCH = 16
GROUP = 8  # samples of a problem in an epoch
EPOCHS = 2
EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_deepspeed.py"

ACCEPT_BARS = {"greedy": 2.2, "T 0.7": 1.8}  # of EAGLE-3
HYBRID_BAR = 1.05
CO_TRAINED_BAR = 1.1
NEVER_SLOWER = 0.97


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """The model and its drafts."""

    model: Path
    eagle3: Path
    block: Path | None = None

    @property
    def drafting(self) -> tuple[str, ...]:
        """Names of the engines that draft."""
        return DRAFTING if self.block is None else (*DRAFTING, BLOCK, BLOCK_HYBRID)

    @property
    def co_trained(self) -> dict[str, Path]:
        """Drafts that are trained along, by their spec."""
        return {"eagle": self.eagle3} | ({} if self.block is None else {"block": self.block})

    def engine(self, name: str, max_running: int, spec_options: dict[str, Any]) -> RolloutEngine:
        """An engine by one of the names above."""
        spec, draft = {
            PLAIN: (PLAIN, None),
            NGRAM: ("ngram", None),
            EAGLE3: ("eagle", self.eagle3),
            HYBRID: ("hybrid", self.eagle3),
            BLOCK: ("block", self.block),
            BLOCK_HYBRID: ("hybrid", self.block),
        }[name]
        own: dict[str, Any] = {} if draft is None else {"draft_path": str(draft)}
        return make_engine(self.model, spec, max_running, spec_options | own)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    name: str
    params: SamplingParams
    batch: int
    hybrid_bar: float | None = None


def settings(max_tokens: int) -> list[Setting]:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=max_tokens)
    warm = SamplingParams(temperature=0.7, max_new_tokens=max_tokens, seed=20)
    hot = SamplingParams(temperature=1.0, max_new_tokens=max_tokens, seed=30)
    return [
        Setting(name="greedy, batch 1", params=greedy, batch=1),
        Setting(name="T 0.7, batch 1", params=warm, batch=1, hybrid_bar=1.7),
        Setting(name="T 0.7, batch 4", params=warm, batch=4, hybrid_bar=1.3),
        Setting(name="T 1.0, batch 8", params=hot, batch=8),
    ]


def accept_lengths(
    folders: Folders,
    prompts: Sequence[Prompt],
    runs: Sequence[SamplingParams],
    *,
    forgets: bool,
) -> Iterator[tuple[str, list[float]]]:
    """Accept lengths up to each of the runs, by drafting engine.

    ``forgets``: every run counts by itself and begins with an empty corpus. Raises RuntimeError
    where drafts changed the tokens.
    """
    expected: list[list[list[int]]] = []
    for name in (PLAIN, *folders.drafting):
        engine = folders.engine(name, BATCH, fixed(NUM_NODES))
        decoded, lengths = [], []
        for params in runs:
            decoded.append([each.token_ids for each in engine.generate(prompts, params)])
            lengths.append(engine.metrics().accept_length)
            if forgets:
                forget(engine)
                engine.reset_metrics()
        expected = expected or decoded
        if decoded != expected:
            raise RuntimeError(f"{name}: speculation changed the tokens")
        if name != PLAIN:
            yield name, lengths


def accept_length_rows(
    folders: Folders, prompts: Sequence[Prompt], max_tokens: int
) -> Iterator[Row]:
    """Tokens per target forward with eight nodes, whatever they cost, of held-out prompts."""
    temperatures = {"greedy": 0.0, "T 0.7": 0.7, "T 1.0": 1.0}
    params = [
        SamplingParams(temperature=temperature, max_new_tokens=max_tokens, seed=1)
        for temperature in temperatures.values()
    ]
    for entrant, lengths in accept_lengths(folders, prompts, params, forgets=True):
        for name, length in zip(temperatures, lengths, strict=True):
            bar = ACCEPT_BARS.get(name) if entrant == EAGLE3 else None
            yield row(f"accept length, {name}: {entrant}", length, "tokens", bar)


def epoch_rows(folders: Folders, problems: Sequence[Prompt], max_tokens: int) -> Iterator[Row]:
    """RL's own work: problems, groups of samples of each, and each again an epoch later."""
    params = SamplingParams(temperature=0.7, max_new_tokens=max_tokens, n=GROUP)
    epochs = [replace(params, seed=epoch) for epoch in range(EPOCHS)]
    name = f"{EPOCHS} epochs, groups of {GROUP}, T 0.7"
    lengths: dict[str, float] = {}
    for entrant, of_epochs in accept_lengths(folders, problems, epochs, forgets=False):
        lengths[entrant] = of_epochs[-1]
        yield row(f"{name}, accept length: {entrant}", lengths[entrant], "tokens")
    ratio = lengths[HYBRID] / max(lengths[NGRAM], lengths[EAGLE3])
    yield row(f"{name}: {HYBRID} to the better alone", ratio, "x", HYBRID_BAR)


def speed_rows(
    folders: Folders, setting: Setting, prompts: Sequence[Prompt], repeats: int
) -> Iterator[Row]:
    """Drafts with the learned budget beside plain decoding, and what drafting costs.

    A pair is a batch of prompts that begin together. Each repeat has them all, with other seeds and
    an empty corpus.
    """
    batch = setting.batch
    whole_batches = len(prompts) // batch * batch
    work = Work(prompts=prompts[:whole_batches] or prompts, params=setting.params, width=batch)
    for name in folders.drafting:
        engines = [folders.engine(name, batch, {}) for _ in range(2)]
        for engine in engines:
            warm_up(engine, prompts[: 2 * batch], setting.params.max_new_tokens)
            engine.reset_metrics()
        times = PairedTimes()
        for repeat in range(repeats):
            for engine in engines:
                forget(engine)
            once = hold(Comparison(*engines), work.of_epoch(repeat), f"{setting.name}, {name}")
            times.extend(once)
        draft_ms = sum(engine.metrics().draft_ms for engine in engines)
        drafting = draft_ms / 1e3 / sum(times.speculative_P)
        bar = (setting.hybrid_bar if name == HYBRID else None) or NEVER_SLOWER
        yield row(f"{setting.name}, speedup: {name}", times.speedup, "x", bar)
        yield row(f"{setting.name}, at least: {name}", times.interval()[0], "x")
        yield row(f"{setting.name}, drafting: {name}", drafting, "of a step")


def co_training_rows(folders: Folders, num_steps: int) -> Iterator[Row]:
    """The GRPO example trains the demo model and co-trains its draft. At the end it rolls out
    held-out problems with the draft as it is and as it was: the same policy, so the same tokens.

    Raises RuntimeError where the example fails or drafts changed its tokens.
    """
    for spec, draft in folders.co_trained.items():
        log = _run_example(folders.model, spec, draft, num_steps)
        steps = [event for event in log if event["event"] == "step"]
        (drafts,) = [event for event in log if event["event"] == "drafts"]
        if not drafts["same"]:
            raise RuntimeError("the drafts changed the tokens")
        following, frozen = drafts["accept_length_co_trained"], drafts["accept_length_frozen"]
        swaps, nats = steps[-1]["draft"]["swaps"], [steps[i]["nll"] for i in (0, -1)]
        print(f"swaps {swaps:.0f} of {num_steps}; nats per token {nats[0]:.2f} to {nats[1]:.2f}")
        co_trained = sum(event["co_train_seconds"] for event in steps)
        others = sum(event["rollout_seconds"] + event["train_seconds"] for event in steps)
        name = f"{spec}, after {num_steps} GRPO steps"
        yield row(f"{name}, accept length: frozen draft", frozen, "tokens")
        yield row(f"{name}, accept length: co-trained draft", following, "tokens")
        yield row(f"{name}: co-trained to frozen", following / frozen, "x", CO_TRAINED_BAR)
        share = co_trained / (co_trained + others)
        yield row(f"{name}: co-training's share of the time", share, "")


def _run_example(model: Path, spec: str, draft: Path, num_steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "log.jsonl"
        options = {
            "--model": model,
            "--spec": spec,
            "--draft": draft,
            "--draft-tokens": NUM_NODES,
            "--co-train": 4,  # updates in a step: with so few rollouts nearly as long as the step
            "--prompts": 6,
            "--samples": 4,
            "--lr": 2e-5,
            "--steps": num_steps,
            "--held-out": 12,
            "--output": output,
        }
        given = [str(part) for pair in options.items() for part in pair]
        command = [sys.executable, str(EXAMPLE), *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{EXAMPLE.name} failed: {done.stderr[-2000:]}")
        return [json.loads(line) for line in output.read_text().splitlines()]


def draft_folder(path: str) -> Path:
    """Raises FileNotFoundError, with the command that makes what is missing."""
    if not (Path(path) / "config.json").exists():
        raise FileNotFoundError(
            f"--draft {path}: no draft there; `make demo-draft` trains the demo model's"
        )
    return Path(path)


def parts(options: argparse.Namespace) -> Parts:
    folders = Folders(
        model=options.model,
        eagle3=draft_folder(options.draft),
        block=draft_folder(options.block) if options.block else None,
    )
    prompts = held_out_prompts(options.prompts, options.num_prompts)
    problems = held_out_prompts(options.prompts, min(4, options.num_prompts), with_answers=True)
    speeds: dict[str, Part] = {
        f"speed, {each.name}": partial(speed_rows, folders, each, prompts, options.repeats)
        for each in settings(options.tokens)
    }
    return {
        "accept length": partial(accept_length_rows, folders, prompts, options.tokens),
        "epochs": partial(epoch_rows, folders, problems, options.tokens),
        "co-training": partial(co_training_rows, folders, options.steps),
        **speeds,
    }


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.option("--draft", "drafts/eagle3", help="an EAGLE-3 draft")
    command.option("--block", "", help="a block draft, measured beside it; default: none")
    held_out = Path("runs/demo/prompts.jsonl")
    command.option("--prompts", held_out, type=Path, help="held-out ones, JSON lines")
    command.option("--num-prompts", 18, quick=2)
    command.option("--tokens", 128, quick=6, help="of a rollout, at most")
    command.option("--steps", 20, quick=1, help="of GRPO, for co-training")
    command.threads(2)
    command.repeats(2)
    return command


if __name__ == "__main__":
    make_command().run("neural drafts, {threads} threads", parts)
