"""Question: do targets with recurrent layers hold as few states as they must, verify trees cheaply,
and let the corpus draft as well as for a dense model?

    python benchmarks/bench_hybrid.py --trace rollouts.npz --steps 1

Models are of random weights, and on the CPU. Bars: one state a request between steps, in a step one
for each committed state, run end and node, none when all have ended; 8 nodes verified in twice the
time of one; the dense model's accept length, on recorded rollouts that both are forced to say.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from decoding import draft_trees
from forced import Recording, force_target, new_policy, steps, waves
from harness.command import Command, Part, Parts
from harness.engines import fixed
from harness.rows import Row, row
from harness.shapes import Shape, change_config, random_engine, write_config
from harness.timing import in_turns, paired
from harness.traces import Trace, add_trace_option, load_traces

from rollout import SamplingParams
from spec_workers.draft_tree import only_roots

SMALL = Shape(
    hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, ffn_size=128,
    vocab_size=49_152, tied=True,
)  # fmt: skip

REFERENCE = Shape(
    hidden_size=512, num_layers=12, num_heads=4, num_kv_heads=2, head_dim=128, ffn_size=1536,
    vocab_size=49_152, tied=True,
)  # fmt: skip

RUNNING, NODES, TOKENS = 16, 8, 48
ACTIVE = 64
CONTEXT = 256
PARENTS = [0, 0, 1, 1, 2, 3, 3]  # of 8 nodes, the root counted

on_cpu = partial(random_engine, device="cpu", dtype="bfloat16")


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


def states_bytes(folder: Path) -> int:
    """One state of all recurrent layers, by config.json alone, the model in bfloat16."""
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    recurrent = layers - layers // config["full_attention_interval"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    convolution = 2 * (2 * keys + values) * (config["linear_conv_kernel_dim"] - 1)
    return int(recurrent * (convolution + 4 * values * config["linear_key_head_dim"]))


def drafting(num_nodes: int) -> dict[str, Any]:
    return fixed(num_nodes) | {"calibration_seconds": 0}


def state_rows(folder: Path) -> Iterator[Row]:
    """Greedy requests over random weights repeat themselves, so the corpus has drafts for them."""
    engine = on_cpu(
        write_hybrid_config(folder, SMALL), "ngram", max_running=RUNNING, prefix_cache=False,
        kv_bytes=1 << 29, spec_options=drafting(NODES),
    )  # fmt: skip
    worker: Any = engine.worker
    pool, states = worker.target.state_pool, worker.memory.states
    pool_bytes = sum(each.nbytes for each in pool.convolutions + pool.recurrent)
    slot_bytes = pool_bytes / (pool.num_slots + 1)
    in_step: list[tuple[int, int]] = []  # slots held, and those the step has reason to hold
    verify = worker.target.verify

    def watched(batch: Any, trees: Any) -> Any:
        reserved = sum(1 + len(entry.states.nodes) for entry in batch.entries)
        in_step.append((states.slots.num_slots - states.obtainable, between[-1] + reserved))
        return verify(batch, trees)

    worker.target.verify = watched
    rng = np.random.default_rng(0)
    for _ in range(RUNNING):
        prompt = rng.integers(3, SMALL.vocab_size, 20).tolist()
        engine.submit(prompt, SamplingParams(temperature=0, max_new_tokens=TOKENS))
    between, per_request = [0], []
    while engine.has_unfinished:
        engine.step()
        between.append(states.slots.num_slots - states.obtainable)
        if engine.last_step.running:
            per_request.append(between[-1] * slot_bytes / engine.last_step.running)
    engine.check_integrity()
    own = states_bytes(folder)
    held, reason = max(in_step)
    bar = partial(row, at_most=True)
    yield row("a state of all layers", own / 2**20, "MiB")
    yield bar("held by a request between steps", max(per_request) / own, "states", 1.0)
    yield row("held in the largest step", held, "slots")
    yield bar("of them, per committed state, run end and node", held / reason, "slots", 1.0)
    yield bar("left when all have ended", between[-1], "slots", 0.0)


def verify_rows(folder: Path, repeats: int) -> Iterator[Row]:
    """One request; trees of one node and of eight take turns."""
    engine = on_cpu(write_hybrid_config(folder, REFERENCE), "none", max_running=1, kv_bytes=1 << 29)
    worker: Any = engine.worker
    prompt = np.random.default_rng(0).integers(3, REFERENCE.vocab_size, CONTEXT).tolist()
    engine.submit(prompt, SamplingParams(max_new_tokens=64, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.scheduler.max_draft_tokens = lambda: len(PARENTS)
    batch = engine.scheduler.schedule()
    tokens_N = np.arange(3, 3 + len(PARENTS), dtype=np.int32)
    trees = {1: only_roots(1), 8: draft_trees([PARENTS], tokens_N)}
    calls = {nodes: partial(worker.target.verify, batch, each) for nodes, each in trees.items()}
    seconds = in_turns(calls, repeats, warm=2)
    worker.memory.end_step()
    yield row("verify of 1 node", 1e3 * median(seconds[1]), "ms")
    yield row("verify of 8 nodes", 1e3 * median(seconds[8]), "ms")
    ratio = paired(seconds[8], seconds[1])
    yield row("verify of 8 nodes beside 1", ratio, "x", 2.0, at_most=True)


def accept_rows(folder: Path, trace: Trace, num_steps: int | None) -> Iterator[Row]:
    """``num_steps``: of the trace, the first ones; None: all."""
    shape = replace(SMALL, vocab_size=max(SMALL.vocab_size, trace.largest_token + 1))
    dense = accept_length(write_config(folder / "dense", shape), trace, num_steps)
    hybrid = accept_length(write_hybrid_config(folder / "hybrid", shape), trace, num_steps)
    yield row(f"{trace.name}: accept length, dense", dense, "tokens")
    yield row(f"{trace.name}: accept length, hybrid", hybrid, "tokens")
    yield row(f"{trace.name}: hybrid's beside dense's", hybrid / dense, "x", 1.0)


def accept_length(folder: Path, trace: Trace, num_steps: int | None) -> float:
    engine = on_cpu(
        folder, "ngram", max_running=ACTIVE, max_step_tokens=2048, chunk_len=2048,
        kv_bytes=1 << 30, spec_options=drafting(NODES),
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


def in_folder(rows: Any, *arguments: Any) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from rows(Path(folder), *arguments)


def parts(options: argparse.Namespace) -> Parts:
    found: dict[str, Part] = {
        "states": partial(in_folder, state_rows),
        "verify": partial(in_folder, verify_rows, options.repeats),
    }
    for trace in load_traces(options.trace):
        name = f"accept length on {trace.name}"
        found[name] = partial(in_folder, accept_rows, trace, options.steps or None)
    return found


def make_command() -> Command:
    command = Command(__doc__)
    add_trace_option(command)
    command.option("--steps", 2, quick=1, limits=(0, float("inf")), help="of each trace; 0: all")
    command.repeats(15)
    command.threads(1)
    return command


if __name__ == "__main__":
    make_command().run("hybrid targets, {threads} threads", parts)
