"""Question: does the corpus draft as well for a target with recurrent layers as for a dense one?

    python benchmarks/bench_hybrid.py --trace rollouts.npz --steps 1

Models are of random weights, on the CPU, and forced to say what was recorded. Bar: the dense
model's accept length.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forced import Recording, force_target, new_policy, steps, waves
from harness.command import Command, Parts
from harness.engines import fixed
from harness.rows import Row, row
from harness.shapes import Shape, change_config, random_engine, write_config
from harness.traces import Trace, add_trace_option, load_traces

SMALL = Shape(
    hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128,
    vocab_size=49_152, tied=True,
)  # fmt: skip

NODES = 8
ACTIVE = 64


def write_hybrid_config(folder: Path, shape: Shape) -> Path:
    """Qwen3.5's: three of four layers recurrent, as many value heads as two hidden sizes hold."""
    dim = min(128, shape.hidden_size // 4)
    value_heads = 2 * shape.hidden_size // dim
    change_config(
        write_config(folder, shape),
        architectures=["Qwen3_5ForCausalLM"],
        linear_conv_kernel_dim=4,
        linear_key_head_dim=dim,
        linear_value_head_dim=dim,
        linear_num_key_heads=value_heads // 2,
        linear_num_value_heads=value_heads,
        full_attention_interval=4,
        partial_rotary_factor=0.25,
    )
    return folder


def accept_rows(trace: Trace, num_steps: int | None) -> Iterator[Row]:
    """``num_steps``: of the trace, the first ones; None: all."""
    shape = replace(SMALL, vocab_size=max(SMALL.vocab_size, trace.largest_token + 1))
    with tempfile.TemporaryDirectory() as folder:
        dense = accept_length(write_config(Path(folder) / "dense", shape), trace, num_steps)
        hybrid = accept_length(
            write_hybrid_config(Path(folder) / "hybrid", shape), trace, num_steps
        )
    yield row(f"{trace.name}: accept length, dense", dense, "tokens")
    yield row(f"{trace.name}: accept length, hybrid", hybrid, "tokens")
    yield row(f"{trace.name}: hybrid's beside dense's", hybrid / dense, "x", 1.0)


def accept_length(folder: Path, trace: Trace, num_steps: int | None) -> float:
    engine = random_engine(
        folder, "ngram", device="cpu", dtype="bfloat16", max_running=ACTIVE, max_step_tokens=2048,
        chunk_len=2048, kv_bytes=1 << 30, spec_options=fixed(NODES) | {"calibration_seconds": 0},
    )  # fmt: skip
    worker: Any = engine.worker
    force_target(worker.target, Recording(trace))
    emitted = forwards = 0
    for number, wave in enumerate(waves(trace, ACTIVE, num_steps)):
        for step in steps(engine, trace, wave):
            emitted += step.tokens
            forwards += step.forwards
        new_policy(engine, number)
    engine.check_integrity()
    return emitted / forwards


def parts(options: argparse.Namespace) -> Parts:
    return {
        trace.name: partial(accept_rows, trace, options.steps or None)
        for trace in load_traces(options.trace)
    }


def make_command() -> Command:
    command = Command(__doc__)
    add_trace_option(command)
    command.option("--steps", 2, quick=1, limits=(0, float("inf")), help="of each trace; 0: all")
    command.threads(1)
    return command


if __name__ == "__main__":
    make_command().run("hybrid targets, {threads} threads", parts)
