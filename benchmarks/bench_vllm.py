"""Question: how fast is this engine beside vLLM, and the corpus inside vLLM beside what vLLM has?

    make bench-vllm
    python benchmarks/bench_vllm.py --vllm-python build/venv-vllm/bin/python [--only plain ...]

Each engine is a process of its own (`engine_process.py`), all on the same cores with the same
threads, in bf16; they take turns, so that one runs while the others wait. A row compares the same
prompts, as token ids, and is not run where engines generated unequal numbers of tokens: every
request generates its limit, whatever it says. Ratios are medians of neighbours' ratios.

Accept length is tokens by forwards of a request, steps without drafts included. The second epoch of
a GRPO-like job is timed four requests at a time, after a first one at sixteen that teaches. vLLM
drafts with `ngram`, `suffix` where arctic-inference is installed beside it (its CUDA part is not
needed), an EAGLE-3 draft where ``--draft`` is there, and `NgramProposer` of this repository.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

from harness.command import Command, Parts
from harness.prompts import OPEN_PROMPTS, REPETITIVE_PROMPTS, chat, reasoning_prompts
from harness.rows import Row, not_run, row
from harness.timing import paired, rotated

from rollout.engine.tokenizer import PromptEncoder
from rollout.models.spec import ModelSpec
from rollout.types import Prompt

PLAIN_BARS = {"batch 1": 1.15, "batch 8": 1.3, "batch 32": 1.3, "group job": 1.3}
SECOND_EPOCH_BAR = 1.5  # of the better of vLLM's own methods, at temperature 0.7
INSIDE_BAR = 0.97  # of vLLM's plain decoding, at temperature 1
ACCEPT_BAR = 1.1  # of its suffix decoding's accept length

OURS_PLAIN, VLLM_PLAIN = "specrollout", "vLLM"
CORPUS_IN_VLLM = "vLLM, our corpus"
SUFFIX = "vLLM, suffix"
PROPOSER = "spec_workers.vllm.NgramProposer"
NUM_TOKENS = 8
STEP_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """What engines generate; a measurement has one of it for each."""

    prompts: list[list[int]]
    tokens: int  # of each sample
    samples: int = 1
    temperature: float = 0.7
    width: int  # prompts at a time
    seed: int = 0


@dataclass(kw_only=True)
class Done:
    """What came of a job on one engine, by repeat."""

    seconds: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    accepted: float = 0.0  # of the last repeat
    peak_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths[-1])

    @property
    def rate(self) -> float:
        return self.num_tokens / median(self.seconds)

    @property
    def accept_length(self) -> float:
        return self.num_tokens / max(1.0, self.num_tokens - self.accepted)


class EngineProcess:
    """An engine that was started. It ends with its standard input, at the latest with this program.

    Every call raises RuntimeError with the end of its log if it ended before.
    """

    def __init__(self, python: Path, asked: Mapping[str, Any], threads: int) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
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
            except RuntimeError as error:
                print(f"{name}: left out, it did not start:\n{error}", flush=True)
                self._running[name] = None
            else:
                warm = Job(prompts=[[1, 2, 3, 4]] * 4, tokens=8, width=4)
                engine.run(warm)
                self._running[name] = engine
        return self._running[name]

    def run(self, names: Sequence[str], job: Job, repeats: int = 1) -> dict[str, Done]:
        """What each engine that is there made of the job, in turns."""
        there = {name: engine for name in names if (engine := self.start(name)) is not None}
        done = {name: Done() for name in there}
        for repeat in range(repeats):
            for name in rotated(list(there), repeat) if there else []:
                answer = there[name].run(job)
                done[name].seconds.append(answer["seconds"])
                done[name].lengths.append(answer["lengths"])
                done[name].accepted = answer["accepted"]
                done[name].peak_bytes = answer["peak_bytes"]
        return done


def engine_options(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """How each engine is started, by name."""
    found: dict[str, dict[str, Any]] = {}
    own_drafts: dict[str, dict[str, Any] | None] = {"": None, "ngram": {}}
    vllm_drafts: dict[str, dict[str, Any] | None] = {
        VLLM_PLAIN: None,
        "vLLM, ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
        SUFFIX: {"method": "suffix"},
        CORPUS_IN_VLLM: {"method": "custom_class", "model": PROPOSER},
    }
    if options.draft.is_dir():
        path = str(options.draft)
        own_drafts |= {"eagle": {"draft_path": path}, "hybrid": {"draft_path": path}}
        vllm_drafts["vLLM, EAGLE-3"] = {
            "method": "eagle3", "model": path, "num_speculative_tokens": 3
        }  # fmt: skip
    for spec, spec_options in own_drafts.items():
        found[f"{OURS_PLAIN}, {spec}" if spec else OURS_PLAIN] = own_options(
            options, spec or "none", spec_options
        )
    for name, draft in vllm_drafts.items():
        found[name] = vllm_options(options, draft)
    return found


def own_options(
    options: argparse.Namespace, spec: str, spec_options: dict[str, Any] | None
) -> dict[str, Any]:
    given = {
        "spec": spec, "spec_options": spec_options, "dtype": "bfloat16", "kv_bytes": 1 << 30,
        "max_running": STEP_ROWS, "device": options.device,
    }  # fmt: skip
    return {"kind": "specrollout", "model": str(options.model), "options": given}


def vllm_options(options: argparse.Namespace, draft: dict[str, Any] | None) -> dict[str, Any]:
    given: dict[str, Any] = {
        "dtype": "bfloat16", "max_num_seqs": STEP_ROWS, "max_model_len": 2048,
        "enforce_eager": options.eager,
    }  # fmt: skip
    if options.device != "cpu":
        given["gpu_memory_utilization"] = 0.15  # all engines share the memory
    if draft is not None:
        given["speculative_config"] = {"num_speculative_tokens": NUM_TOKENS} | draft
    return {"kind": "vllm", "model": str(options.model), "options": given}


class Prompts:
    """Prompts as token ids, the same for both engines."""

    def __init__(self, model: Path) -> None:
        self._encoder = PromptEncoder.from_pretrained(model, ModelSpec.read(model).vocab_size)

    def of(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return [self._encoder.encode(prompt) for prompt in prompts]


def equal_counts(done: Mapping[str, Done]) -> bool:
    """Whether all engines generated as many tokens for each sample in each repeat."""
    return len({json.dumps(each.lengths) for each in done.values()}) == 1


def compare(
    title: str, done: Mapping[str, Done], own: str, other: str, bar: float | None
) -> Iterator[Row]:
    """The rates of all, and the ratio of one to another."""
    for name, each in done.items():
        yield row(f"{title}: {name}", each.rate, "tokens/s")
        if each.accepted:
            yield row(f"{title}: {name}, accept length", each.accept_length, "tokens")
    ratio = f"{title}: {own} beside {other}"
    if own not in done or other not in done or not equal_counts(done):
        yield not_run(ratio, "x", bar)
    else:
        yield row(ratio, paired(done[other].seconds, done[own].seconds), "x", bar)


def plain_rows(options: argparse.Namespace, engines: Engines) -> Iterator[Row]:
    """Plain decoding, the first tokens included."""
    prompts = Prompts(options.model)
    tasks = prompts.of(reasoning_prompts(24))
    open_ones = prompts.of([chat(text) for text in OPEN_PROMPTS])
    some = partial(Job, tokens=options.tokens)
    jobs = {
        "batch 1": some(prompts=open_ones[:4], width=1),
        "batch 8": some(prompts=open_ones, width=8),
        "batch 32": some(prompts=[*open_ones, *tasks], width=32),
        "group job": some(prompts=tasks, samples=8, width=24, tokens=max(1, options.tokens // 2)),
    }
    both = [OURS_PLAIN, VLLM_PLAIN]
    for title, job in jobs.items():
        done = engines.run(both, job, options.repeats)
        yield from compare(title, done, OURS_PLAIN, VLLM_PLAIN, PLAIN_BARS[title])
    first = engines.run(both, Job(prompts=tasks[:8], tokens=1, width=1), options.repeats)
    for name, each in first.items():
        yield row(f"time to first token: {name}", 1e3 * median(each.seconds) / 8, "ms")
        engine = engines.start(name)
        assert engine is not None
        yield row(f"start: {name}", engine.start_seconds, "s")
        yield row(f"peak memory: {name}", each.peak_bytes / 2**20, "MiB")


def second_epoch_rows(
    options: argparse.Namespace, engines: Engines, temperature: float
) -> Iterator[Row]:
    """The second epoch of a job whose first one everybody has generated."""
    names = list(engine_options(options))
    offset = 0 if temperature < 1 else 4  # prompts that the other temperature has not taught
    prompts = Prompts(options.model).of(reasoning_prompts(8))[offset : offset + 4]
    job = partial(
        Job, prompts=prompts, tokens=options.tokens // 2 or 1, samples=4, temperature=temperature
    )
    engines.run(names, job(width=4, seed=1))
    done = engines.run(names, job(width=1, seed=2))
    title = f"second epoch, temperature {temperature:g}, batch 4"
    methods = {name: done[name].rate for name in done if name not in _NOT_VLLMS}
    best = max(methods, key=methods.__getitem__, default=VLLM_PLAIN)
    bar = SECOND_EPOCH_BAR if temperature < 1 else None
    yield from compare(title, done, f"{OURS_PLAIN}, ngram", best, bar)
    yield from inside_rows(title, done, None if temperature < 1 else INSIDE_BAR)


_NOT_VLLMS = (
    OURS_PLAIN, f"{OURS_PLAIN}, ngram", f"{OURS_PLAIN}, eagle", f"{OURS_PLAIN}, hybrid",
    VLLM_PLAIN, CORPUS_IN_VLLM,
)  # fmt: skip


def inside_rows(title: str, done: Mapping[str, Done], bar: float | None) -> Iterator[Row]:
    """The corpus inside vLLM beside vLLM itself."""
    name, accept = f"{title}: {CORPUS_IN_VLLM} beside {VLLM_PLAIN}", f"{title}: accept length"
    if CORPUS_IN_VLLM not in done or VLLM_PLAIN not in done or not equal_counts(done):
        yield not_run(name, "x", bar)
    else:
        own, plain = done[CORPUS_IN_VLLM], done[VLLM_PLAIN]
        yield row(name, paired(plain.seconds, own.seconds), "x", bar)
    if CORPUS_IN_VLLM not in done or SUFFIX not in done:
        yield not_run(f"{accept} beside {SUFFIX}", "x", ACCEPT_BAR)
    else:
        ratio = done[CORPUS_IN_VLLM].accept_length / done[SUFFIX].accept_length
        yield row(f"{accept} beside {SUFFIX}", ratio, "x", ACCEPT_BAR)


def repeated_text_rows(options: argparse.Namespace, engines: Engines) -> Iterator[Row]:
    """Greedy text that repeats its prompt."""
    prompts = Prompts(options.model).of([chat(text) for text in REPETITIVE_PROMPTS])
    job = Job(prompts=prompts, tokens=options.tokens, temperature=0.0, width=1)
    done = engines.run(list(engine_options(options)), job, options.repeats)
    title = "greedy text that repeats, batch 1"
    yield from compare(title, done, f"{OURS_PLAIN}, ngram", "vLLM, ngram", None)
    yield from inside_rows(title, done, None)


def parts(options: argparse.Namespace) -> Parts:
    if not options.vllm_python.exists():
        print(f"{options.vllm_python}: no such file; `make bench-vllm` makes it", flush=True)
        return {"skipped": list}
    engines = Engines(options)
    return {
        "plain": partial(plain_rows, options, engines),
        "second epoch, 0.7": partial(second_epoch_rows, options, engines, 0.7),
        "second epoch, 1.0": partial(second_epoch_rows, options, engines, 1.0),
        "repeated text": partial(repeated_text_rows, options, engines),
    }


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(2)
    command.repeats(2)
    command.option("--tokens", 96, quick=8, limits=(2, 512), help="of a sample")
    command.option("--vllm-python", Path("build/venv-vllm/bin/python"), type=Path,
                   help="of the environment that has vLLM and this package")  # fmt: skip
    command.option("--draft", Path("drafts/eagle3"), type=Path, help="an EAGLE-3 draft's folder")
    command.option("--device", "cpu", help="of both engines")
    command.flag("--eager", "vLLM starts without compiling, and is slower")
    return command


if __name__ == "__main__":
    make_command().run("beside vLLM on {device}, {threads} threads", parts)
