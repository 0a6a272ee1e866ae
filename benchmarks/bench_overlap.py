"""Question: is the host's proposing hidden where two halves of the requests take turns, and is
overlap=auto never slower than whole steps?

    python benchmarks/bench_overlap.py --shape 8b --json overlap.json

A model of random weights decodes `--batch` requests with NGRAM, twice: in the second pass, which
`exact=true` makes say the same, the corpus knows every answer, and all that it proposes is
verified. Halves that take turns (`scheduler.overlap=always`) race whole steps (`never`). Bars on a
GPU: a half's proposal takes less than the forward that it runs beside; `auto` reaches 0.98 of the
throughput of `never`. Without a GPU the shape is `tiny`, nothing is hidden and no bar applies.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.command import POSITIVE, Command
from harness.rows import Row, row
from harness.shapes import Shape, add_shape_options, config_folder, send_random_weights, shape_parts

from rollout import RolloutEngine, SamplingParams
from rollout.config import Overlap, engine_config
from spec_workers.ngram import build

_PROMPT = 32  # tokens
_MIN_ACCEPT_LENGTH = 4.0  # of answers that the corpus knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Figures of the second pass; milliseconds are medians of its steps."""

    tokens_per_second: float
    propose_ms: float
    forward_ms: float
    accept_length: float


def measure(folder: Path, overlap: Overlap, options: argparse.Namespace) -> Timed:
    chosen = {
        "device": options.device, "load_format": "dummy", "max_running": options.batch,
        "max_step_tokens": 2048, "chunk_len": 2048, "overlap": overlap,
        "max_context_len": _PROMPT + options.tokens, "exact": True,
    }  # fmt: skip
    config = engine_config(str(folder), chosen)
    worker: Any = build(config, budget="fixed", calibration_seconds=0.0)
    engine = RolloutEngine(config, worker)
    send_random_weights(engine)
    proposing: list[float] = []
    propose = worker.propose

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        trees = propose(*arguments)
        proposing.append(1e3 * (time.perf_counter() - started))
        return trees

    worker.propose = timed
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, engine.vocab_size, _PROMPT).tolist() for _ in range(options.batch)]
    params = SamplingParams(temperature=0.0, max_new_tokens=options.tokens, ignore_eos=True)
    engine.generate(prompts, params)
    engine.reset_metrics()
    proposing.clear()
    for index, prompt in enumerate(prompts):
        engine.submit(prompt, params, prompt_index=index)
    forwards = []
    started = time.perf_counter()
    while engine.has_unfinished:
        engine.step()
        forwards.append(engine.last_step.forward_ms)
    seconds = time.perf_counter() - started
    total = engine.metrics()
    engine.close()
    if total.accept_length < _MIN_ACCEPT_LENGTH:
        raise RuntimeError(
            f"overlap={overlap}: {total.accept_length:.2f} tokens a step of the second pass: "
            "it did not repeat the first, so next to nothing was proposed"
        )
    return Timed(
        tokens_per_second=total.generated_tokens / seconds,
        propose_ms=statistics.median(proposing) if proposing else 0.0,
        forward_ms=statistics.median(forwards),
        accept_length=total.accept_length,
    )


def shape_rows(name: str, shape: Shape, options: argparse.Namespace) -> Iterator[Row]:
    label = f"{name}, {options.batch} requests"
    judged = torch.device(options.device).type == "cuda"
    with config_folder(shape) as folder:
        whole = measure(folder, Overlap.never, options)
        yield row(f"{label}: NGRAM propose", whole.propose_ms, "ms")
        yield row(f"{label}: forward", whole.forward_ms, "ms")
        yield row(f"{label}: accept length", whole.accept_length, "tokens")
        for overlap in (Overlap.always, Overlap.auto):
            gc.collect()  # or weights and keys stay beside the next one's
            found = measure(folder, overlap, options)
            if overlap is Overlap.always:
                yield row(f"{label}, a half: NGRAM propose", found.propose_ms, "ms")
                yield row(f"{label}, a half: forward", found.forward_ms, "ms")
                hidden = f"{label}, a half: propose / forward (hidden below 1)"
                ratio, bar = found.propose_ms / found.forward_ms, 1.0 if judged else None
                yield row(hidden, ratio, "ratio", bar, at_most=True)
            ratio = found.tokens_per_second / whole.tokens_per_second
            bar = 0.98 if judged and overlap is Overlap.auto else None
            yield row(f"{label}: throughput of overlap={overlap} / never", ratio, "ratio", bar)
    gc.collect()


def make_command() -> Command:
    on_gpu = torch.cuda.is_available()
    command = Command(__doc__)
    add_shape_options(command)
    command.option("--batch", 256 if on_gpu else 32, quick=4, limits=POSITIVE, help="requests")
    command.option("--tokens", 192 if on_gpu else 24, limits=POSITIVE, help="of each")
    return command


if __name__ == "__main__":
    make_command().run("halves that take turns, on {device}", shape_parts(shape_rows, "8b", "demo"))
