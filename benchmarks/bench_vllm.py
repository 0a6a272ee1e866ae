"""Question: how fast is this engine beside vLLM, plain and with drafts?

    make bench-vllm
    python benchmarks/bench_vllm.py --vllm-python build/venv-vllm/bin/python [--only plain ...]

Each engine is a process of its own (`engine_process.py`), all on the same cores with the same
threads, in bf16; at each job they take turns, so that one runs while the others wait. A row
compares the same prompts, as token ids, and is not run where engines generated unequal numbers of
tokens: every request generates its limit, whatever it says. Ratios are medians of neighbours'
ratios.

Accept length is tokens by forwards of a request, its first token left out and steps without drafts
included. The second epoch of a GRPO-like job is timed four requests at a time, prompt by prompt,
after a first one that teaches. vLLM drafts with `ngram`, and with `suffix` where
arctic-inference is installed beside it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from engines import (
    OURS_NGRAM,
    OURS_PLAIN,
    SUFFIX,
    VLLM_NGRAM,
    VLLM_PLAIN,
    Done,
    Engines,
    Job,
    engine_options,
)
from harness.command import Command, Parts
from harness.prompts import OPEN_PROMPTS, REPETITIVE_PROMPTS, chat, reasoning_prompts
from harness.rows import Row, not_run, row
from harness.timing import paired

from rollout.engine.tokenizer import PromptEncoder
from rollout.models.spec import ModelSpec
from rollout.types import Prompt

PLAIN_BARS = {"batch 1": 1.15, "batch 8": 1.3, "batch 32": 1.3, "group job": 1.3}
SECOND_EPOCH_BAR = 1.5  # of the better of vLLM's own methods, at temperature 0.7


def encoded(model: Path, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Prompts as token ids, the same for both engines."""
    encoder = PromptEncoder.from_pretrained(model, ModelSpec.read(model).vocab_size)
    return [encoder.encode(prompt) for prompt in prompts]


def equal_counts(done: Mapping[str, Done]) -> bool:
    """Whether all engines generated as many tokens for each sample of each job."""
    return len({json.dumps(each.lengths) for each in done.values()}) == 1


def rates(title: str, done: Mapping[str, Done]) -> Iterator[Row]:
    for name, each in done.items():
        yield row(f"{title}: {name}", each.rate, "tokens/s")
        if each.accept_length > 1:
            yield row(f"{title}: {name}, accept length", each.accept_length, "tokens")


def ratio(title: str, done: Mapping[str, Done], own: str, other: str, bar: float | None) -> Row:
    """How many times as fast one is as another."""
    name = f"{title}: {own} beside {other}"
    if own not in done or other not in done or not equal_counts(done):
        return not_run(name, "x", bar)
    return row(name, paired(done[other].seconds, done[own].seconds), "x", bar)


def plain_rows(options: argparse.Namespace, engines: Engines) -> Iterator[Row]:
    """Plain decoding, the first tokens included."""
    tasks = encoded(options.model, reasoning_prompts(24))
    open_ones = encoded(options.model, [chat(text) for text in OPEN_PROMPTS])
    some = partial(Job, tokens=options.tokens)
    jobs = {
        "batch 1": some(prompts=open_ones[:4], width=1),
        "batch 8": some(prompts=open_ones, width=8),
        "batch 32": some(prompts=[*open_ones, *tasks], width=32),
        "group job": some(prompts=tasks, samples=8, width=24, tokens=max(1, options.tokens // 2)),
    }
    both = [OURS_PLAIN, VLLM_PLAIN]
    for title, job in jobs.items():
        done = engines.run(both, [job] * options.repeats)
        yield from rates(title, done)
        yield ratio(title, done, OURS_PLAIN, VLLM_PLAIN, PLAIN_BARS[title])
    first = engines.run(both, [Job(prompts=tasks[:8], tokens=1, width=1)] * options.repeats)
    for name, each in first.items():
        milliseconds = 1e3 * sum(each.seconds) / sum(map(len, each.lengths))
        yield row(f"time to first token: {name}", milliseconds, "ms")
        engine = engines.start(name)
        assert engine is not None
        yield row(f"start: {name}", engine.start_seconds, "s")
        yield row(f"peak memory: {name}", each.peak_bytes / 2**20, "MiB")


def prefill_jobs(scale: float) -> dict[str, Job]:
    """Prompts of which one token is asked. Earlier prompts of a job may be in the prefix cache.

    ``scale``: of the prompts' lengths.
    """
    draw = random.Random(5)

    def ids(count: int) -> list[int]:
        return [draw.randrange(1000, 20_000) for _ in range(max(1, round(count * scale)))]

    shared, conversation = ids(1024), ids(1536)
    turn = len(conversation) // 8
    one = partial(Job, tokens=1)
    return {
        "32 distinct prompts of 256 tokens": one(prompts=[ids(256) for _ in range(32)], width=32),
        "4 prompts of 1,920 tokens": one(prompts=[ids(1920) for _ in range(4)], width=4),
        "32 prompts that share 1,024 of 1,088 tokens, 8 at a time": one(
            prompts=[shared + ids(64) for _ in range(32)], width=8
        ),
        "8 turns of 192 tokens each": one(
            prompts=[conversation[: turn * (k + 1)] for k in range(8)], width=1
        ),
    }


def prefill_rows(options: argparse.Namespace, engines: Engines) -> Iterator[Row]:
    """Prompt tokens by second, those counted that are found in the prefix cache."""
    for title, job in prefill_jobs(options.prompt_scale).items():
        done = engines.run([OURS_PLAIN, VLLM_PLAIN], [job] * options.repeats)
        for name, each in done.items():
            tokens = options.repeats * sum(map(len, job.prompts))
            yield row(f"{title}: {name}", tokens / sum(each.seconds), "prompt tokens/s")
        yield ratio(title, done, OURS_PLAIN, VLLM_PLAIN, None)


def second_epoch_rows(
    options: argparse.Namespace, engines: Engines, temperature: float
) -> Iterator[Row]:
    """The second epoch of a job whose first one everybody has generated."""
    names = list(engine_options(options))
    offset = 0 if temperature < 1 else 4  # prompts that the other temperature has not taught
    prompts = encoded(options.model, reasoning_prompts(8))[offset : offset + 4]
    tokens = max(2, options.tokens // 2)
    job = partial(Job, tokens=tokens, samples=4, temperature=temperature, width=4)
    engines.run(names, [job(prompts=prompts, seed=1)])
    done = engines.run(names, [job(prompts=[prompt], seed=2) for prompt in prompts])
    title = f"second epoch, temperature {temperature:g}, batch 4"
    yield from rates(title, done)
    methods = {name: each.rate for name, each in done.items() if name in VLLMS_METHODS}
    best = max(methods, key=methods.__getitem__, default=VLLM_NGRAM)
    bar = SECOND_EPOCH_BAR if temperature < 1 else None
    yield ratio(title, done, OURS_NGRAM, best, bar)


VLLMS_METHODS = (VLLM_NGRAM, SUFFIX)


def repeated_text_rows(options: argparse.Namespace, engines: Engines) -> Iterator[Row]:
    """Greedy text that repeats its prompt."""
    prompts = encoded(options.model, [chat(text) for text in REPETITIVE_PROMPTS])
    job = partial(Job, tokens=options.tokens, temperature=0.0, width=1)
    jobs = [job(prompts=[prompt]) for prompt in prompts] * options.repeats
    done = engines.run(list(engine_options(options)), jobs)
    title = "greedy text that repeats, batch 1"
    yield from rates(title, done)
    yield ratio(title, done, OURS_NGRAM, VLLM_NGRAM, None)


def parts(options: argparse.Namespace) -> Parts:
    if not options.vllm_python.exists():
        print(f"{options.vllm_python}: no such file; `make bench-vllm` makes it", flush=True)
        return {"skipped": list}
    engines = Engines(options)
    return {
        "plain": partial(plain_rows, options, engines),
        "prefill": partial(prefill_rows, options, engines),
        "epoch-0.7": partial(second_epoch_rows, options, engines, 0.7),
        "epoch-1.0": partial(second_epoch_rows, options, engines, 1.0),
        "repeated": partial(repeated_text_rows, options, engines),
    }


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(2)
    command.repeats(2)
    command.option("--tokens", 96, quick=8, help="of a sample")
    command.option("--prompt-scale", 1.0, quick=0.1, help="of prompts of the prefill")
    command.option("--vllm-python", Path("build/venv-vllm/bin/python"), type=Path,
                   help="of the environment that has vLLM and this package")  # fmt: skip
    command.option("--device", "cpu", help="of both engines")
    command.flag("--eager", "vLLM starts without compiling, and is slower")
    return command


if __name__ == "__main__":
    make_command().run("beside vLLM on {device}, {threads} threads", parts)
