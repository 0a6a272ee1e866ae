"""Question: is speculation with its learned budget never slower than plain decoding, faster where
drafts pay, and as fast as the best fixed number of draft tokens?

    python benchmarks/bench_budget.py [--only GRPO] [--repeats 1]
    python benchmarks/bench_budget.py --trace rollouts.npz=2.1 --only replay

Engines that decode the same work take turns of a fraction of a second and must emit the same
tokens; a speedup is the median over the repeats. Bars: at least 0.97x to 2x plain decoding, by what
there is to repeat; at least the best fixed number; at most a tenth of the time outside the forward;
exactness at most 1.1x. Traces, given with the speedup that is their bar, are replayed under a
roofline's prices (`budget_replay.py`); one is sampled from the model at temperature 1 and kept in
runs/, whose bar is 1.0.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from budget_replay import replay_rows
from harness.command import Command, Part, Parts
from harness.engines import PLAIN, corpus_of, fixed, make_engine, warm_up
from harness.prompts import OPEN_PROMPTS, REPETITIVE_PROMPTS, chat, reasoning_prompts
from harness.race import Races, hold_races
from harness.rows import Row, row
from harness.timing import in_turns, paired
from harness.traces import load_trace, synthetic_trace

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.types import Prompt

BUDGET = "budget"
GRPO = "GRPO step, third epoch, T 0.5"
"""Few prompts, many samples, a few stragglers. The step is over when its last rollout is, so the
tail in which few requests run counts as much as the beginning in which all do."""

_FIXED = (2, 4, 8, 16)  # draft tokens; none at all is plain decoding
_KV_BYTES = 512 << 20
_SAMPLED = Path("runs/sampled_temperature_1.npz")


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    name: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    batch: int
    bar: float  # least speedup
    epochs_before: int = 0  # run, untimed and with other seeds, before each timed pass


def workloads() -> list[Workload]:
    open_ended = [chat(text) for text in OPEN_PROMPTS]
    tasks = reasoning_prompts(8)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=192)
    hot = SamplingParams(temperature=1.0, max_new_tokens=80, seed=100)
    warm = SamplingParams(temperature=0.7, max_new_tokens=96, n=4, seed=200)
    step = SamplingParams(temperature=0.5, max_new_tokens=512, n=8, seed=300)
    differing = ("gsm_symbolic", "calendar_arithmetic", "leg_counting", "time_intervals")
    return [
        Workload(name="greedy, repetitive, batch 1", prompts=[chat(t) for t in REPETITIVE_PROMPTS],
                 params=greedy, batch=1, bar=2.0),
        *(Workload(name=f"open prompts, T 1.0, batch {batch}", params=hot, batch=batch, bar=0.98,
                   prompts=(open_ended * 4)[: max(3, 2 * batch)]) for batch in (1, 4, 8, 16)),
        *(Workload(name=f"second epoch, T 0.7, batch {batch}", params=warm, batch=batch, bar=bar,
                   prompts=tasks[:count], epochs_before=1)
          for batch, count, bar in ((1, 2, 1.25), (4, 4, 1.1), (16, 8, 1.0))),
        Workload(name=GRPO, prompts=[reasoning_prompts(1, task)[0] for task in differing],
                 params=step, batch=32, bar=1.25, epochs_before=2),
    ]  # fmt: skip


def shortened(work: Workload) -> Workload:
    params = replace(work.params, max_new_tokens=6, n=min(2, work.params.n))
    return replace(work, prompts=work.prompts[:2], params=params)


def hold(model: Path, work: Workload, repeats: int, **others: dict[str, Any]) -> Races:
    """Race plain decoding, the budget and ``others``, engines by their `spec_options`.

    The epochs before are the budget's own. In each repeat every drafting engine has the corpus as
    they left it; all else that a budget learns goes on from repeat to repeat, as in a longer run.
    """
    specs: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: (PLAIN, {}), BUDGET: ("ngram", {})}
    specs |= {name: ("ngram", options) for name, options in others.items()}
    engines = {
        name: make_engine(model, spec, work.batch, options, kv_bytes=_KV_BYTES)
        for name, (spec, options) in specs.items()
    }
    for engine in engines.values():
        warm_up(engine, (list(work.prompts) * 8)[: 2 * work.batch], work.params.max_new_tokens)
    for epoch in range(work.epochs_before):
        engines[BUDGET].generate(work.prompts, replace(work.params, seed=epoch))
        for engine in engines.values():  # training that changes nothing: drafts are older from now
            engine.update_weights_from_disk(model, weight_version=epoch + 1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus_of(engines[BUDGET]).save(corpus)

        def prepare() -> None:
            for name in engines.keys() - {PLAIN}:
                corpus_of(engines[name]).load(corpus)

        races = hold_races(engines, work.prompts, work.params, repeats, prepare)
    print(f"{work.name}: {races.describe()}", flush=True)
    return races


def decoding_rows(model: Path, work: Workload, repeats: int) -> Iterator[Row]:
    races = hold(model, work, repeats)
    yield row(f"{work.name}: plain", races.tokens_per_second(PLAIN), "tokens/s")
    yield row(f"{work.name}: budget", races.tokens_per_second(BUDGET), "tokens/s")
    yield row(f"{work.name}: accept length", races.metrics[BUDGET].accept_length, "tokens")
    yield row(f"{work.name}: speedup", races.speedup(BUDGET, over=PLAIN), "x", work.bar)
    if work.batch == 8:
        for name, own in races.metrics.items():
            outside = 1 - own.forward_ms / own.total_ms
            yield row(f"outside the forward, batch 8, {name}", outside, "share", 0.1, at_most=True)


def grpo_rows(model: Path, work: Workload, repeats: int) -> Iterator[Row]:
    others = {f"fixed {count}": fixed(count) for count in _FIXED}
    races = hold(model, work, repeats, **others)
    deciles = np.quantile(races.lengths, (0.0, 0.1, 0.5, 0.9, 1.0)).round().astype(int)
    at_limit = sum(length == work.params.max_new_tokens for length in races.lengths)
    print(f"{GRPO}: lengths {deciles.tolist()}, {at_limit} at the limit", flush=True)
    yield row(f"{GRPO}: plain", median(races.seconds[PLAIN]), "s")
    yield row(f"{GRPO}: accept length", races.metrics[BUDGET].accept_length, "tokens")
    for name in others:
        yield row(f"{GRPO}: {name}", races.speedup(name, over=PLAIN), "x")
    yield row(f"{GRPO}: speedup", races.speedup(BUDGET, over=PLAIN), "x", work.bar)
    best = best_by_median(races.seconds, [PLAIN, *others])
    ratio = races.speedup(BUDGET, over=best)
    yield row(f"{GRPO}: over the best fixed, {best}", ratio, "x", 1.0)


def best_by_median(seconds: dict[str, list[float]], names: Sequence[str]) -> str:
    """The name of the least median time; the least of every repeat would be luck."""
    return min(names, key=lambda name: median(seconds[name]))


def exactness_rows(model: Path, work: Workload, repeats: int) -> Iterator[Row]:
    """Seconds of plain decoding with exact=true over those with exact=false; 1 is free."""

    def calls(engine: RolloutEngine) -> list[Rollout]:
        engine.flush_cache()
        return engine.generate(work.prompts, work.params)

    seconds = in_turns(
        {
            exact: partial(calls, make_engine(model, PLAIN, work.batch, {}, exact=exact))
            for exact in (False, True)
        },
        repeats,
    )
    ratio = paired(seconds[True], seconds[False])
    yield row(f"price of exact=true, batch {work.batch}", ratio, "x", 1.1, at_most=True)


def sampled_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Open prompts at temperature 1 hardly repeat themselves: the hardest case for drafts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / _SAMPLED.name if options.quick else _SAMPLED
        if not path.exists():
            tokens, samples = (6, 2) if options.quick else (56, 16)
            params = SamplingParams(temperature=1.0, max_new_tokens=tokens, n=samples)
            sample_trace(options.model, path, params, epochs=2)
        yield from replay_rows(load_trace(path), None if options.quick else 1.0)


def sample_trace(model: Path, path: Path, params: SamplingParams, epochs: int) -> None:
    """Write a trace of open prompts, ``params.n`` samples of each in each of the steps."""
    engine = make_engine(model, PLAIN, 64, {}, kv_bytes=1 << 30)
    prompts = [chat(text) for text in OPEN_PROMPTS]
    rollouts: list[Rollout] = []
    for epoch in range(epochs):
        rollouts += engine.generate(prompts, replace(params, seed=params.seed + epoch))
    nats = -np.mean([logprob for rollout in rollouts for logprob in rollout.logprobs])
    print(f"{path}: {nats:.2f} nats a token", flush=True)
    prompt_ids = {rollout.prompt_index: rollout.prompt_ids for rollout in rollouts}
    epoch_of_R = np.repeat(np.arange(epochs), len(rollouts) // epochs)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        prompt_tokens=np.concatenate([prompt_ids[i] for i in range(len(prompts))]),
        prompt_off=np.cumsum([0, *(len(prompt_ids[i]) for i in range(len(prompts)))]),
        resp_tokens=np.concatenate([rollout.token_ids for rollout in rollouts]),
        resp_off=np.cumsum([0, *(len(rollout.token_ids) for rollout in rollouts)]),
        resp_prompt=np.array([rollout.prompt_index for rollout in rollouts]),
        resp_epoch=epoch_of_R,
        resp_step=epoch_of_R,
    )


def barred_trace(value: str) -> tuple[Path, float | None]:
    """Parse FILE or FILE=BAR."""
    path, equals, bar = value.rpartition("=")
    if not equals:
        return Path(value), None
    try:
        return Path(path), float(bar)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{value!r}: after '=' must come the least speedup, a number"
        ) from None


def parts(options: argparse.Namespace) -> Parts:
    works = [shortened(work) if options.quick else work for work in workloads()]
    found: dict[str, Part] = {
        work.name: partial(grpo_rows if work.name == GRPO else decoding_rows,
                           options.model, work, options.repeats)
        for work in works
    }  # fmt: skip
    for work in works:
        if work.name.startswith("open prompts") and work.batch in (1, 8):
            found[f"price of exactness, batch {work.batch}"] = partial(
                exactness_rows, options.model, work, options.repeats
            )
    traces = [(load_trace(path), bar) for path, bar in options.trace]
    for trace, bar in traces or [(synthetic_trace(), None)]:
        found[f"replay of {trace.name}"] = partial(replay_rows, trace, bar)
    found[f"replay of {_SAMPLED.stem}"] = partial(sampled_rows, options)
    return found


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(2)
    command.repeats(3)
    help = "recorded rollouts to replay, with the least speedup that is good; repeatable"
    command.option("--trace", [], type=barred_trace, action="append", metavar="FILE[=BAR]",
                   help=help)  # fmt: skip
    return command


if __name__ == "__main__":
    make_command().run("draft budget, {threads} threads", parts)
