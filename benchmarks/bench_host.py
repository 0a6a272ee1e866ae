"""Question: what does the host take in a step on a GPU, and how much of it while the device idles?
Needs no GPU; there are no bars.

    python benchmarks/bench_host.py --trace rollouts.npz --batch 1 8 --json host.json

The real engine decodes recorded tokens on the way of a GPU, around a device that takes no time and
says what was recorded: see `host_device.py`. What the device does not hide is the time from reading
what was sampled to launching the next forward: then it idles. Launches themselves are not in it,
for nothing is launched.

Times are medians over steps in which every request decodes, with NGRAM and a fixed number of draft
nodes (`fixed`), and without drafts (`none`). cProfile tells which functions take them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forced import Recording
from harness.command import POSITIVE, Command, Parts
from harness.rows import Row, row
from harness.shapes import Shape, config_folder, send_random_weights
from harness.traces import Trace, add_trace_option, load_traces, trace_of
from host_device import HostClock, NoCapture, NoGraph, StandIn

from rollout import RolloutEngine, SamplingParams
from rollout.config import (
    DType,
    EngineConfig,
    LoadFormat,
    MemoryConfig,
    ModelConfig,
    SchedulerConfig,
)
from rollout.ops import gpu
from rollout.sampling.sampler import TreeSampler
from spec_workers.budget import FixedBudget
from spec_workers.corpus.ngram_corpus import NgramCorpus
from spec_workers.corpus.options import CorpusOptions
from spec_workers.ngram import NgramWorker
from spec_workers.none import PlainWorker
from spec_workers.spec_worker import SpecWorker
from spec_workers.target import TargetWorker

SHAPE = Shape(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=32,
    vocab_size=49_152, tied=True,
)  # fmt: skip

SPECS = ["none", "fixed"]

ADMITTING = 40
"""Steps at most until every prompt has run."""

SETTLING = 40
"""Steps before those that are timed."""

PER_PROMPT = 8  # requests


def repeated(trace: Trace, count: int, length: int) -> Trace:
    """``count`` responses of at least ``length`` tokens, eight to a prompt, so that requests stay
    for as long as they are looked at.

    Each is the recorded responses of its prompt end to end, from another one on.
    """
    recorded: dict[int, list[Any]] = {}
    for prompt, response in zip(trace.prompt_of_R.tolist(), trace.responses, strict=True):
        if len(response):
            recorded.setdefault(prompt, []).append(response)
    used = sorted(recorded)
    prompts = [used[request // PER_PROMPT % len(used)] for request in range(count)]
    responses = []
    for request, prompt in enumerate(prompts):
        own, at, parts, total = recorded[prompt], request, [], 0
        while total < length:
            parts.append(own[at % len(own)])
            total += len(parts[-1])
            at += 1
        responses.append(np.concatenate(parts))
    return trace_of(trace.name, trace.prompts, responses, prompts, [list(range(count))])


def open_engine(folder: Path, spec: str, batch: int, nodes: int, length: int) -> RolloutEngine:
    config = EngineConfig(
        model=ModelConfig(
            path=str(folder), device="cpu", dtype=DType.float32, load_format=LoadFormat.dummy,
            max_context_len=2 * length,
        ),
        memory=MemoryConfig(
            kv_bytes=1 << 30, max_kv_tokens=(batch + 1) * 2 * length, graph_rows=4096
        ),
        scheduler=SchedulerConfig(
            max_running=batch, max_step_tokens=max(2048, batch), chunk_len=2048
        ),
        exact=False,
    )  # fmt: skip
    target = TargetWorker(config, capture=NoCapture())
    worker: SpecWorker = PlainWorker(target)
    if spec != "none":
        worker = NgramWorker(
            target, NgramCorpus(SHAPE.vocab_size, CorpusOptions()), num_draft_tokens=nodes,
            calibration_seconds=0.0, budget=FixedBudget(0.02),
        )  # fmt: skip
    engine = RolloutEngine(config, worker)
    send_random_weights(engine)
    return engine


def measure(
    engine: RolloutEngine, trace: Trace, steps: int, clock: HostClock
) -> list[tuple[float, float]]:
    """The host's seconds in each step, while the device idles and while it computes."""
    for request, response in enumerate(trace.responses):
        engine.submit(
            trace.prompts[trace.prompt_of_R[request]].tolist(),
            SamplingParams(max_new_tokens=len(response), ignore_eos=True),
            prompt_index=int(trace.prompt_of_R[request]),
            sample_index=request,
        )
    batch = len(trace.responses)
    while engine.last_step.sampling < batch or engine.last_step.running < batch:
        engine.step()
    for _ in range(SETTLING):
        engine.step()
    clock.take()
    found = []
    for _ in range(steps):
        engine.step()
        found.append(clock.take())
        assert engine.last_step.sampling == batch
    return found


def host_rows(options: argparse.Namespace, trace: Trace, spec: str, batch: int) -> Iterator[Row]:
    steps = options.steps if batch <= 64 else max(1, options.steps // 2)
    most = 1 if spec == "none" else options.nodes + 1
    length = (ADMITTING + SETTLING + steps) * most
    recorded = repeated(trace, batch, length)
    context = length + max(map(len, recorded.prompts)) + max(map(len, recorded.responses))
    gpu.runs_on = lambda device: True  # from now on the CPU goes the way of a GPU
    with config_folder(SHAPE) as folder:
        engine = open_engine(folder, spec, batch, options.nodes, context)
    worker: Any = engine.worker
    if spec != "none":
        for response in trace.responses:
            worker.corpus.insert(response)
    clock = HostClock()
    clock.launch_at(NoGraph, "replay")
    clock.wait_at(TreeSampler, "read")
    StandIn(worker.target, Recording(recorded), clock)
    taken = measure(engine, recorded, steps, clock)
    clock.stop()
    engine.close()
    label = f"{spec}, batch {batch}"
    yield row(f"{label}: a step", 1e6 * statistics.median(map(sum, taken)), "us")
    idle = statistics.median(seconds for seconds, _ in taken)
    yield row(f"{label}: while the device idles", 1e6 * idle, "us")


def parts(options: argparse.Namespace) -> Parts:
    torch.set_num_threads(1)
    return {
        f"{trace.name}, {spec}, batch {batch}": partial(host_rows, options, trace, spec, batch)
        for trace in load_traces(options.trace)
        for spec in options.spec
        for batch in options.batch
    }


def make_command() -> Command:
    command = Command(__doc__)
    add_trace_option(command)
    command.option("--batch", [1, 8, 32, 64, 256], quick=[3], nargs="+", limits=POSITIVE)
    command.option("--spec", SPECS, nargs="+", choices=SPECS)
    command.option("--nodes", 8, limits=(1, 63), help="most draft nodes per request")
    command.option("--steps", 160, quick=4, limits=POSITIVE, help="timed; half above batch 64")
    return command


if __name__ == "__main__":
    make_command().run("the host's part of a step", parts)
