"""Recorded rollouts through the whole engine, over a model of random weights of any size.

The tokens are forced to the recorded ones, so accept lengths are real; the model runs as it would,
so the time is real too. Rollouts of one step of the trace run together, 64 at a time unless
--active says more, and after each step the policy changes. Every figure stands beside the least
time that the device allows.

    python benchmarks/bench_replay.py --trace rollouts.npz --shape 8b --shape 32b --active 64 256

Without --trace a made-up one is replayed; without a GPU the shape is `tiny` unless one is named,
which shows that it runs and says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from replay_bench.roofline import Ceilings, add_floors_option
from replay_bench.run import Replayed, replay
from replay_bench.shape_options import add_shape_options, chosen_shapes
from replay_bench.shapes import SHAPES, write_config, write_draft
from table import Row, finishing, parser, row
from traces import Trace, load_traces


def spec_options(spec: str, nodes: int, draft: Path) -> dict[str, Any]:
    if spec == "none":
        return {}
    options: dict[str, Any] = {"num_draft_tokens": nodes}
    return options | ({"draft_path": str(draft)} if spec == "hybrid" else {})


def times(label: str, result: Replayed) -> Iterator[Row]:
    total = result.total
    yield row(f"{label}: tokens", total.tokens / total.seconds, "tokens/s")
    yield row(f"{label}: floor / time", total.floor_seconds / total.seconds, "ratio")
    compiled = result.unsettled_seconds / total.seconds
    yield row(f"{label}: steps that compiled or captured", compiled, "of the time")


def compare(label: str, plain: Replayed, result: Replayed, bars: bool) -> Iterator[Row]:
    """``bars``: whether those of an H100 or H200 apply: 1.9x at 64 running, nowhere under 1.0x."""
    yield row(f"{label}: accept length", result.total.accept_length, "tokens")
    speedup = plain.total.seconds / result.total.seconds
    yield row(f"{label}: speedup", speedup, "x", 1.9 if bars else None)
    waves = zip(plain.by_wave, result.by_wave, strict=True)
    worst = min(before.seconds / after.seconds for before, after in waves)
    bar = 1.0 if bars else None
    yield row(f"{label}: worst step of the trace", worst, "x", bar)
    for running, spent in sorted(
        result.by_running.items(), key=lambda item: int(item[0].split()[0])
    ):
        before = plain.by_running.get(running)
        if before is not None and spent.tokens and before.tokens:
            ratio = before.seconds / before.tokens / (spent.seconds / spent.tokens)
            yield row(f"{label}: {running}, time per token", ratio, "x", bar)


def run(options: argparse.Namespace, trace: Trace, shape_name: str, active: int) -> Iterator[Row]:
    """Each row as soon as it is measured."""
    shape = SHAPES[shape_name]
    device = torch.device(options.device)
    largest = max(int(tokens.max()) for tokens in (*trace.prompts, *trace.responses))
    if largest >= shape.vocab_size:
        raise SystemExit(f"{trace.name}: token {largest} is beyond shape {shape_name}'s vocabulary")
    ceilings = Ceilings.of(device, options.floors)
    overrides = {"device": options.device, "dtype": "bfloat16", "exact": not options.fast}
    # Nobody else is on the GPU; on a CPU half of its memory would be touched for nothing.
    overrides |= {"kv_bytes": 1 << 30} if device.type == "cpu" else {"kv_fraction": 0.9}
    name = f"{trace.name}, {shape_name}, {active} active"
    bars = shape_name == "8b" and active == 64 and ceilings.judged and bool(options.trace)
    plain: Replayed | None = None
    with tempfile.TemporaryDirectory() as folder:
        model, draft = Path(folder) / "model", Path(folder) / "draft"
        write_config(model, shape)
        if "hybrid" in options.spec:
            write_draft(draft, shape)
        for spec in dict.fromkeys(["none", *options.spec]):
            started = time.perf_counter()
            result = replay(
                model,
                shape,
                trace,
                spec=spec,
                spec_options=spec_options(spec, options.nodes, draft),
                active=active,
                num_waves=options.steps,
                ceilings=ceilings,
                hit_rate=options.draft_hit,
                overrides=overrides,
            )
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(
                f"{shape_name} {active} {spec}: {time.perf_counter() - started:.0f} s", flush=True
            )
            yield from times(f"{name}, {spec}", result)
            if plain is None:
                plain = result
            else:
                yield from compare(f"{name}, {spec}", plain, result, bars)


def main() -> None:
    arguments = parser(__doc__)
    on_gpu = add_shape_options(arguments)
    arguments.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    arguments.add_argument("--active", type=int, nargs="+", default=[64], help="rollouts at once")
    arguments.add_argument("--spec", nargs="+", default=["ngram", "hybrid"])
    arguments.add_argument("--nodes", type=int, default=8, help="most draft nodes per request")
    arguments.add_argument("--steps", type=int, help="of the trace; default: all, 2 on a CPU")
    arguments.add_argument("--fast", action="store_true", help="exact=false")
    add_floors_option(arguments)
    arguments.add_argument(
        "--draft-hit",
        type=float,
        default=0.6,
        help="share of positions at which hybrid's draft is told the recorded token",
    )
    options = arguments.parse_args()
    if not 0 <= options.draft_hit <= 1 or math.isnan(options.draft_hit):
        arguments.error(f"--draft-hit={options.draft_hit}: must be in [0, 1]")
    if options.steps is None and not on_gpu:
        options.steps = 2
    with finishing(f"replay on {options.device}", options.json) as rows:
        for trace in load_traces(options.trace):
            for shape in chosen_shapes(options, ["8b"]):
                for active in options.active:
                    rows.extend(run(options, trace, shape, active))


if __name__ == "__main__":
    main()
