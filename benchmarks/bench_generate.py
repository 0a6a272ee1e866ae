"""Question: how fast is plain decoding beside transformers, with the same model, dtype, prompts and
token counts?

    python benchmarks/bench_generate.py --repeats 1
    python benchmarks/bench_generate.py --shape 8b        # random weights, nothing read from disk

Our engine samples first, lengths as they fall; transformers then generates exactly as many tokens
for each prompt: by `generate`, waiting in each batch for its longest row, as its users must, and by
its continuous batching, which does not wait. The latter runs on a GPU only. Bars on a CPU: 1.3x at
batch 1 and 8, 1.5x at 32, 2x for 64 rollouts of 8 prompts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from harness.command import Command, Parts
from harness.prompts import OPEN_PROMPTS, chat, reasoning_prompts
from harness.rows import Row, row
from harness.shapes import SHAPES, config_folder

from rollout import Rollout, RolloutEngine, SamplingParams

TEMPERATURE = 1.0

LENGTHS = (16, 256)
"""Tokens of the shortest and the longest rollout of a model of random weights, drawn evenly."""

_MAX_RUNNING = 64
_KV_TOKENS = _MAX_RUNNING * 512  # of a model of random weights: transformers' model needs room too

BARS = {1: 1.3, 8: 1.3, 32: 1.5, 64: 2.0}  # by batch


def continuous_seconds(model: Any, rollouts: list[Rollout]) -> float:
    """Seconds transformers' continuous batching takes for the same, its start not counted.

    Raises RuntimeError where it ends before it has answered.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    counts = {f"request-{index}": len(rollout.token_ids) for index, rollout in enumerate(rollouts)}
    with model.continuous_batching_context_manager(generation_config=config) as manager:
        started = time.perf_counter()
        for name, rollout in zip(counts, rollouts, strict=True):
            manager.add_request(
                rollout.prompt_ids, request_id=name, max_new_tokens=len(rollout.token_ids)
            )
        while counts:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError(f"continuous batching stopped with {len(counts)} to go")
            elif result.is_finished():
                emitted = len(result.generated_tokens)
                if emitted != counts.pop(result.request_id):
                    raise RuntimeError(f"continuous batching emitted {emitted} tokens, or failed")
        return time.perf_counter() - started


@torch.inference_mode()
def generate_seconds(model: Any, rollouts: list[Rollout]) -> float:
    """Seconds `generate` takes for one padded batch with these prompts and token counts."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    width = max(len(rollout.prompt_ids) for rollout in rollouts)
    device = model.device
    missing = [width - len(rollout.prompt_ids) for rollout in rollouts]
    ids = torch.tensor(
        [[0] * n + each.prompt_ids for n, each in zip(missing, rollouts, strict=True)]
    )
    mask = torch.tensor([[0] * n + [1] * (width - n) for n in missing])
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts], device=device)

    class EnoughTokens(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] - width >= lengths

    started = time.perf_counter()
    model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=int(lengths.max()),
        stopping_criteria=StoppingCriteriaList([EnoughTokens()]),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def compare(
    name: str,
    engine: RolloutEngine,
    model: Any,
    prompts: Sequence[Any],
    params: SamplingParams | list[SamplingParams],
    *,
    batch_sizes: Sequence[int],
    repeats: int,
    bar: float | None = None,
) -> Iterator[Row]:
    """The best of the repeats on all sides; for `generate` the best of ``batch_sizes`` too."""
    ours: list[float] = []
    theirs: list[float] = []
    continuously: list[float] = []
    rollouts: list[Rollout] = []
    for _ in range(repeats):
        engine.flush_cache()
        started = time.perf_counter()
        rollouts = engine.generate(prompts, params)
        ours.append(time.perf_counter() - started)
        for size in batch_sizes:
            batches = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
            theirs.append(sum(generate_seconds(model, batch) for batch in batches))
        if engine.worker.model_device.type == "cuda":
            continuously.append(continuous_seconds(model, rollouts))
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    yield row(f"{name}: specrollout", tokens / min(ours), "tokens/s")
    yield row(f"{name}: transformers", tokens / min(theirs), "tokens/s")
    yield row(f"{name}: ratio", min(theirs) / min(ours), "x", bar)
    if continuously:
        yield row(f"{name}: continuous batching", tokens / min(continuously), "tokens/s")
        yield row(f"{name}: ratio to it", min(continuously) / min(ours), "x")


def shaped(name: str, device: str) -> tuple[RolloutEngine, Any]:
    """An engine and transformers' model of that shape, with the same random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with config_folder(SHAPES[name]) as folder:
        engine = RolloutEngine.from_pretrained(
            folder, spec="none", load_format="dummy", max_running=_MAX_RUNNING, device=device,
            max_kv_tokens=_KV_TOKENS,
        )  # fmt: skip
        config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=engine.worker.model_dtype).eval()
    engine.update_weights_from_tensor(model.state_dict().items())
    return engine, model


def shaped_rows(options: argparse.Namespace) -> Iterator[Row]:
    engine, model = shaped(options.shape, options.device)
    randomness = random.Random(0)
    prompts = [
        [randomness.randrange(engine.vocab_size) for _ in range(randomness.randint(32, 256))]
        for _ in range(64)
    ]
    counts = [min(options.tokens, randomness.randint(*LENGTHS)) for _ in prompts]
    params = [
        SamplingParams(temperature=TEMPERATURE, max_new_tokens=count, ignore_eos=True)
        for count in counts
    ]
    engine.generate(prompts[:2], SamplingParams(max_new_tokens=8, ignore_eos=True))  # warm
    for size in (1, 8) if options.quick else (1, 8, 32, 64):
        yield from compare(
            f"{options.shape}, batch {size}", engine, model, prompts[:size], params[:size],
            batch_sizes=(size,), repeats=options.repeats,
        )  # fmt: skip


def model_rows(options: argparse.Namespace) -> Iterator[Row]:
    from transformers import AutoModelForCausalLM

    started = time.perf_counter()
    engine = RolloutEngine.from_pretrained(
        options.model, spec="none", max_running=_MAX_RUNNING, device=options.device
    )
    yield row("load the model", time.perf_counter() - started, "s")
    dtype, device = engine.worker.model_dtype, engine.worker.model_device
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval().to(device)
    bars = BARS if device.type == "cpu" else {}
    open_prompts = [chat(text) for text in OPEN_PROMPTS]
    tasks = reasoning_prompts(24)
    engine.generate(open_prompts[:2], SamplingParams(max_new_tokens=8))  # warm

    tokens = min(128, options.tokens)
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=tokens, seed=1)
    for size, prompts in ((1, tasks[:1]), (8, open_prompts), (32, open_prompts + tasks)):
        yield from compare(
            f"batch {size}, {dtype}", engine, model, prompts, params, bar=bars.get(size),
            batch_sizes=(size,), repeats=options.repeats,
        )  # fmt: skip
    group = [*open_prompts[:4], *tasks[:4]]
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=options.tokens, seed=2, n=8)
    yield from compare(
        f"8 prompts x 8 samples, {dtype}", engine, model, group, params, bar=bars.get(64),
        batch_sizes=(8, 64), repeats=1,
    )  # fmt: skip
    metrics = engine.metrics()
    yield row("engine time to first rollout", metrics.first_rollout_seconds or 0.0, "s")
    peak = metrics.peak_memory_bytes / 2**20
    yield row("peak memory, transformers' copy included", peak, "MiB")


def parts(options: argparse.Namespace) -> Parts:
    rows = shaped_rows if options.shape else model_rows
    return {options.shape or options.model.name: partial(rows, options)}


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(2)
    command.repeats(2)
    command.option("--tokens", 256, quick=4, limits=(1, 256), help="of a rollout, at most")
    command.option("--device", "cuda" if torch.cuda.is_available() else "cpu")
    command.option("--shape", choices=SHAPES, help="random weights instead of --model")
    return command


if __name__ == "__main__":
    make_command().run("generate on {device}, {threads} threads", parts)
