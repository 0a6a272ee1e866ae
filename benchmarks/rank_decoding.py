"""Decoding on one rank and on several, each rank on a core of its own, in turns.

Ranks run as those of a job do: rank 0 tells the others what to call.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness.rows import Row, row
from harness.shapes import Shape, random_engine, write_config
from harness.timing import paired, rotated

from rollout import RolloutEngine, SamplingParams
from rollout.config import ParallelConfig, ParallelMode
from rollout.engine.spmd import OpenEngine, run_spmd
from rollout.models.checkpoint import Progress
from rollout.parallel.model_ranks import host_store, launch_variables

PROMPT = list(range(1, 17))
RATIO_BAR = 1.4
OUTSIDE_BAR = 5.0  # per cent


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

    def turn(self, engine: Any) -> float:
        """Seconds of a step that decodes one request."""
        engine.submit(PROMPT, SamplingParams(max_new_tokens=self.steps + 1, ignore_eos=True))
        engine.step()  # the prompt
        started = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        return (time.perf_counter() - started) / self.steps


class ForwardClock:
    """Measures in each turn of a rank the share of its time outside the forward, from the end of
    its first step to the end of its last."""

    def __init__(self, engine: Any) -> None:
        self._steps: list[float] = []  # when those of the turn ended
        self._in_forward = 0.0
        self.parts: list[float] = []
        target = engine.worker.target
        target.verify = self._timed(target.verify)
        engine.step = self._marked(engine.step)
        engine.submit = self._restarted(engine.submit)

    def end_turn(self) -> None:
        if len(self._steps) > 1:
            self.parts.append(1 - self._in_forward / (self._steps[-1] - self._steps[0]))
        self._steps.clear()

    def _timed(self, verify: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(verify)
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            forwarded = verify(*args)
            self._in_forward += time.perf_counter() - started
            return forwarded

        return timed

    def _marked(self, step: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(step)
        def marked() -> Any:
            ended = step()
            if not self._steps:
                self._in_forward = 0.0
            self._steps.append(time.perf_counter())
            return ended

        return marked

    def _restarted(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(submit)
        def restarted(*args: Any, **options: Any) -> Any:
            self.end_turn()
            return submit(*args, **options)

        return restarted


def run_rank(rank: int, decoding: Decoding, port: int, pipe: Connection) -> None:
    """A rank's process. Rank 0 answers each message with a turn's time; in the end all send what
    their clocks have."""
    size = len(decoding.cores)
    os.sched_setaffinity(0, {decoding.cores[rank]})
    torch.set_num_threads(1)
    os.environ.update(launch_variables(rank, size, port, rank))
    clocks: list[ForwardClock] = []

    def open_engine(progress: Progress | None) -> RolloutEngine:
        parallel = {"mode": decoding.parallel.mode.value, "size": size}
        engine = random_engine(
            Path(decoding.folder), "none", kv_bytes=64 << 20, num_threads=1, parallel=parallel
        )
        clocks.append(ForwardClock(engine))
        return engine

    def lead(open_all: OpenEngine) -> None:
        engine = open_all(None)
        pipe.send(None)  # it is ready
        while pipe.recv():
            pipe.send(decoding.turn(engine))
        engine.close()

    run_spmd(decoding.parallel, open_engine, lead)
    clocks[0].end_turn()
    pipe.send(clocks[0].parts)


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

    def turn(self) -> float:
        self._pipes[0].send(True)
        return self._pipes[0].recv()

    def end(self) -> list[list[float]]:
        """Each rank's part of each turn outside the forward."""
        self._pipes[0].send(False)
        return [pipe.recv() for pipe in self._pipes]


def decoding_rows(
    name: str, shape: Shape, cores: Sequence[int], *, steps: int, repeats: int
) -> Iterator[Row]:
    """One rank on the first core against one on each; the first turn of each does not count."""
    seconds: dict[int, list[float]] = {1: [], len(cores): []}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), shape)
        decodings = [Decoding(folder, tuple(cores[:size]), steps) for size in seconds]
        with RankProcesses(decodings[0]) as one, RankProcesses(decodings[1]) as several:
            turns = {1: one.turn, len(cores): several.turn}
            for repeat in range(repeats + 1):
                for size in rotated(list(turns), repeat):
                    taken = turns[size]()
                    if repeat:
                        seconds[size].append(taken)
            outside = several.end()
    label = f"{name}, batch 1: a step"
    for size, each in seconds.items():
        yield row(f"{label}, ranks {size}, a core each", 1e3 * statistics.median(each), "ms")
    ratio = paired(seconds[1], seconds[len(cores)])
    yield row(f"{label}, one rank / {len(cores)} ranks", ratio, "ratio", RATIO_BAR)
    for rank, turns_of_rank in enumerate(outside):
        share = 100 * statistics.median(turns_of_rank[1:])
        bar = OUTSIDE_BAR if rank else None
        label = f"{name}, batch 1: rank {rank} outside the forward"
        yield row(label, share, "%", bar, at_most=True)
