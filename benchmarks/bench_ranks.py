"""Questions: what do two cores gain for one model, and what does it cost to tell the other rank
what to run? Bars: 2 ranks on 2 cores decode at batch 1 at least 1.4 times as fast as one rank on
one, and telling takes at most 3 % of a step at batch 8.

    python benchmarks/bench_ranks.py --cores 0 1 --json ranks.jsonl

Ranks are processes on this machine with a core of `--cores` and one thread each, which run as those
of a job do: rank 0 tells the others what to run. By default the model is of the demo's size, with
heads that 2 ranks can share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
from harness.command import Command, Parts
from harness.rows import Row, row
from harness.shapes import SHAPES, write_checkpoint
from harness.timing import paired, rotated

from rollout import RolloutEngine, SamplingParams
from rollout.config import ParallelConfig, ParallelMode
from rollout.engine.spmd import OpenEngine, run_spmd
from rollout.models.checkpoint import Progress
from rollout.parallel.model_ranks import host_store, launch_variables

PROMPT = list(range(1, 17))
BATCHES = (1, 8)
RATIO_BAR = 1.4  # at batch 1
TELLING_BAR = 3.0  # per cent, at batch 8


@dataclass(frozen=True, slots=True)
class Decoding:
    """A rank's engine and its turns. ``cores``: of the ranks."""

    folder: str
    cores: tuple[int, ...]
    steps: int

    @property
    def parallel(self) -> ParallelConfig:
        size = len(self.cores)
        mode = ParallelMode.tensor if size > 1 else ParallelMode.none
        return ParallelConfig(mode=mode, size=size)

    def turn(self, engine: RolloutEngine, batch: int, telling: TellingClock) -> tuple[float, float]:
        """Seconds of a step that decodes so many requests, and those of telling the others."""
        params = SamplingParams(max_new_tokens=self.steps + 1, ignore_eos=True)
        for _ in range(batch):
            engine.submit(PROMPT, params)
        engine.step()  # the prompts
        telling.seconds, started = 0.0, time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        return (time.perf_counter() - started) / self.steps, telling.seconds / self.steps


class TellingClock:
    """Adds up what rank 0 takes to tell the other ranks what they run."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.seconds = 0.0
        self._leader = engine.worker.ranks.leader
        self._tell, self._leader.tell = self._leader.tell, self._timed  # type: ignore[method-assign]

    def _timed(self, message: object) -> None:
        started = time.perf_counter()
        self._tell(message)
        self.seconds += time.perf_counter() - started


def run_rank(rank: int, decoding: Decoding, port: int, pipe: Connection) -> None:
    """A rank's process. Rank 0 answers each batch size with a turn's times."""
    size = len(decoding.cores)
    os.sched_setaffinity(0, {decoding.cores[rank]})
    torch.set_num_threads(1)
    os.environ.update(launch_variables(rank, size, port, rank))

    def open_engine(progress: Progress | None) -> RolloutEngine:
        parallel = {"mode": decoding.parallel.mode.value, "size": size}
        return RolloutEngine.from_pretrained(
            decoding.folder, "none", kv_bytes=64 << 20, num_threads=1, parallel=parallel
        )

    def lead(open_all: OpenEngine) -> None:
        engine = cast(RolloutEngine, open_all(None))
        telling = TellingClock(engine)
        pipe.send(None)  # it is ready
        while batch := pipe.recv():
            pipe.send(decoding.turn(engine, batch, telling))

    run_spmd(decoding.parallel, open_engine, lead)


class RankProcesses:
    """The ranks of one model. A context manager that kills them."""

    def __init__(self, decoding: Decoding) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._store = host_store()
        pipes = [spawn.Pipe() for _ in decoding.cores]
        self._pipes = [own for own, _ in pipes]
        self._processes = [
            spawn.Process(target=run_rank, args=(rank, decoding, self._store.port, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()  # so that one that dies ends the waiting for it

    def __enter__(self) -> RankProcesses:
        self._pipes[0].recv()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def turn(self, batch: int) -> tuple[float, float]:
        self._pipes[0].send(batch)
        return self._pipes[0].recv()


def decoding_rows(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """One rank on the first core against one on each; the first turn of each does not count."""
    cores, several = options.cores, len(options.cores)
    sizes = (1, several)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), SHAPES[name])
        decodings = [Decoding(folder, tuple(cores[:size]), options.steps) for size in sizes]
        with RankProcesses(decodings[0]) as one, RankProcesses(decodings[1]) as all_ranks:
            turns = {1: one.turn, several: all_ranks.turn}
            for batch in BATCHES:
                seconds: dict[int, list[float]] = {size: [] for size in sizes}
                telling: list[float] = []
                for repeat in range(options.turns + 1):
                    for size in rotated(list(turns), repeat):
                        taken, told = turns[size](batch)
                        if repeat:
                            seconds[size].append(taken)
                            telling += [told / taken] * (size > 1)
                label = f"{name}, batch {batch}: a step"
                for size, each in seconds.items():
                    milliseconds = 1e3 * statistics.median(each)
                    yield row(f"{label}, ranks {size}, a core each", milliseconds, "ms")
                bar = RATIO_BAR if batch == 1 else None
                ratio = paired(seconds[1], seconds[several])
                yield row(f"{label}, one rank / {several} ranks", ratio, "ratio", bar)
                share, bar = 100 * statistics.median(telling), None if batch == 1 else TELLING_BAR
                yield row(f"{label}: telling the others", share, "%", bar, at_most=True)


def parts(options: argparse.Namespace) -> Parts:
    names = options.shape or ["tiny" if options.quick else "even"]
    return {name: partial(decoding_rows, name, options) for name in names}


def make_command() -> Command:
    command = Command(__doc__)
    command.option("--shape", [], choices=SHAPES, action="append", help="of the model")
    command.option("--cores", [0, 1], nargs="+", help="one for each rank")
    command.option("--steps", 100, quick=3, help="of a turn")
    command.option("--turns", 9, quick=1, help="of each number of ranks")
    return command


if __name__ == "__main__":
    make_command().run("ranks that run one model", parts)
