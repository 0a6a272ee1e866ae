"""The n-gram corpus by itself: accept length on replayed rollouts, and what it costs.

    python benchmarks/bench_corpus.py [--trace FILE ...] [--json FILE]

A trace is an `.npz` of recorded rollouts: `prompt_tokens, prompt_off, resp_tokens, resp_off,
resp_prompt, resp_step`. Replay is exact: the recorded response is what the target sampled, the
longest path of the draft tree that spells it is accepted, then one token more. Without a trace one
is made up: groups whose samples follow one another in part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from table import Row, finish, parser, row

from ngram_native import Corpus

# Accept length at 8 nodes and 64 active: arctic-inference 0.3.0 (tree, factor 4), as measured once.
ARCTIC = {"gsm_rollouts_t05": 2.67, "procedural_groups": 4.32}


@dataclass(kw_only=True, slots=True)
class Trace:
    name: str
    prompts: list[NDArray[np.int32]]
    responses: list[NDArray[np.int32]]
    prompt_of: list[int]
    steps: list[list[int]]  # responses rolled out together, in order


@dataclass(kw_only=True, slots=True)
class Replay:
    emitted: int = 0
    forwards: int = 0
    drafted: int = 0
    propose_seconds: float = 0.0
    extend_seconds: float = 0.0
    judged: list[tuple[float, bool]] = field(default_factory=list)  # estimate, accepted


def load_trace(path: Path) -> Trace:
    with np.load(path) as arrays:
        prompts = np.split(arrays["prompt_tokens"].astype(np.int32), arrays["prompt_off"][1:-1])
        responses = np.split(arrays["resp_tokens"].astype(np.int32), arrays["resp_off"][1:-1])
        steps = [np.flatnonzero(arrays["resp_step"] == s) for s in np.unique(arrays["resp_step"])]
        return Trace(
            name=path.stem,
            prompts=prompts,
            responses=responses,
            prompt_of=arrays["resp_prompt"].tolist(),
            steps=[step.tolist() for step in steps],
        )


def synthetic_trace(seed: int = 0) -> Trace:
    """8 samples each of 8 prompts, over 4 epochs: each response is a path through phrases of its
    prompt, with a phrase of its own now and then."""
    rng = np.random.default_rng(seed)
    phrases = [[rng.integers(0, 30_000, rng.integers(3, 20)) for _ in range(24)] for _ in range(8)]
    trace = Trace(name="synthetic", prompts=[], responses=[], prompt_of=[], steps=[])
    trace.prompts = [np.concatenate(own[:4]).astype(np.int32) for own in phrases]
    for _ in range(4):
        trace.steps.append([])
        for prompt, own in enumerate(phrases):
            for _ in range(8):
                at, parts = 4, []
                for _ in range(rng.integers(5, 40)):
                    novel = rng.random() < 0.1
                    parts.append(rng.integers(0, 30_000, 6) if novel else own[at])
                    at = (at + 1 if rng.random() < 0.8 else rng.integers(24)) % 24
                trace.steps[-1].append(len(trace.responses))
                trace.responses.append(np.concatenate(parts).astype(np.int32))
                trace.prompt_of.append(prompt)
    return trace


def longest_path(tree: list[tuple[int, int]], to_come: list[int]) -> list[int]:
    """Nodes, from 0, of the path that spells the start of `to_come`; tree: (token, parent)."""
    path: list[int] = []
    parent = 0
    for j, (token, above) in enumerate(tree):
        if above == parent and len(path) < len(to_come) and token == to_come[len(path)]:
            path.append(j)
            parent = j + 1
    return path


def replay(trace: Trace, corpus: Corpus, *, budget: int, floor: float, active: int) -> Replay:
    result = Replay()
    for version, step in enumerate(trace.steps):
        corpus.set_weight_version(version)
        waiting, left = step[::-1], {}
        while waiting or left:
            while waiting and len(left) < active:
                response = waiting.pop()
                prompt = trace.prompt_of[response]
                corpus.open(response, prompt, trace.prompts[prompt])
                left[response] = trace.responses[response].tolist()
            ids = np.array(list(left), np.int64)
            budgets = np.full(len(ids), budget, np.int32)
            start = time.perf_counter()
            proposal = corpus.propose(ids, budgets, floor)
            result.propose_seconds += time.perf_counter() - start
            tokens, parents = proposal.tokens_N.tolist(), proposal.parents_N.tolist()
            estimates = proposal.probabilities_N.tolist()
            offsets = proposal.offsets_B1.tolist()
            emitted, ends = [], [0]
            for b, response in enumerate(list(left)):
                nodes = range(offsets[b], offsets[b + 1])
                tree = [(tokens[n], parents[n]) for n in nodes]
                path = longest_path(tree, left[response])
                accepted = set(path)
                result.judged += [(estimates[n], n - offsets[b] in accepted) for n in nodes]
                count = min(len(path) + 1, len(left[response]))
                emitted += left[response][:count]
                ends.append(len(emitted))
                left[response] = left[response][count:]
            result.emitted += len(emitted)
            result.forwards += len(ids)
            result.drafted += len(tokens)
            start = time.perf_counter()
            corpus.extend(ids, np.array(emitted, np.int32), np.array(ends, np.int64))
            result.extend_seconds += time.perf_counter() - start
            for response in [response for response, rest in left.items() if not rest]:
                corpus.close(response)
                del left[response]
    return result


def calibration_error(judged: list[tuple[float, bool]]) -> float:
    """Mean distance of estimate and acceptance over ten equal bins, weighted by size."""
    estimates, accepted = np.array(judged).T
    bins = np.minimum((estimates * 10).astype(int), 9)
    gaps = [abs(accepted[bins == i].sum() - estimates[bins == i].sum()) for i in range(10)]
    return float(sum(gaps) / len(judged))


def trace_rows(trace: Trace, *, budget: int, active: int) -> list[Row]:
    rows = []
    for floor in (0.0, 0.05, 0.3):
        corpus = Corpus()
        got = replay(trace, corpus, budget=budget, floor=floor, active=active)
        corpus.check_integrity()
        bar = ARCTIC.get(trace.name) if floor <= 0.05 and budget == 8 and active == 64 else None
        name = f"{trace.name}, floor {floor}"
        rows.append(row(f"{name}: accept length", got.emitted / got.forwards, "tokens", bar))
        rows.append(row(f"{name}: drafted", got.drafted / got.forwards, "nodes/request"))
        if floor == 0:
            # The whole call from Python, at the batch's own size.
            query = got.propose_seconds / got.forwards * 1e6
            extend = got.extend_seconds / got.emitted * 1e6
            rows += [
                row(f"{name}: propose", query, "us/request", 12, at_most=True),
                row(f"{name}: extend", extend, "us/token", 2, at_most=True),
                row(f"{name}: estimate off by", calibration_error(got.judged), "probability"),
            ]
    return rows


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def scale_rows(num_tokens: int, seed: int = 0) -> list[Row]:
    """Throughput and memory, with documents of 1,000 random tokens: every context is new, which
    is the slowest case."""
    rng = np.random.default_rng(seed)
    documents = list(rng.integers(0, 50_000, (num_tokens // 1000, 1000), dtype=np.int32))
    held = 64 << 20
    corpus = Corpus(max_bytes=held)
    table = corpus.num_bytes
    half = len(documents) // 2
    filling = seconds(lambda: [corpus.insert(d, group=i // 8) for i, d in enumerate(documents)])
    full = corpus.counters()
    dropping = seconds(lambda: [corpus.insert(d, group=i // 8) for i, d in enumerate(documents)])
    per_token = (full["live_bytes"] - table) / full["live_tokens"]
    with_table = full["live_bytes"] / full["live_tokens"]
    adding = seconds(lambda: corpus.add_external("external", documents[:half]))
    size = corpus.counters()
    external_bytes = size["external_bytes"] / size["external_tokens"]
    removing = seconds(lambda: corpus.remove_external("external"))
    resetting = seconds(corpus.reset)
    return [
        row("insert, filling", num_tokens / filling, "tokens/s", 1e6),
        row("insert, full and dropping", num_tokens / dropping, "tokens/s", 1e6),
        row("memory, table apart", per_token, "bytes/token", 31, at_most=True),
        row("memory, full", with_table, "bytes/token", 31, at_most=True),
        row("memory, of its bound", size["live_bytes"] / held, "share", 1, at_most=True),
        row("external, add", half * 1000 / adding, "tokens/s", 1e6),
        row("external, memory", external_bytes, "bytes/token", 31, at_most=True),
        row("external, remove", removing * 1e3, "ms", 200, at_most=True),
        row("reset", resetting * 1e3, "ms", 350, at_most=True),
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--trace", type=Path, action="append", default=[])
    arguments.add_argument("--budget", type=int, default=8, help="draft nodes per request")
    arguments.add_argument("--active", type=int, default=64, help="sequences of a batch")
    arguments.add_argument("--tokens", type=int, default=4_000_000, help="of the memory rows")
    options = arguments.parse_args()
    traces = [load_trace(path) for path in options.trace] or [synthetic_trace()]
    rows = []
    for trace in traces:
        rows += trace_rows(trace, budget=options.budget, active=options.active)
    rows += scale_rows(options.tokens)
    finish("n-gram corpus", rows, options.json)


if __name__ == "__main__":
    main()
