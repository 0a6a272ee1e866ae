"""Plain decoding against transformers: same model, dtype, prompts and token counts.

Our engine samples first, lengths as they fall; transformers then generates exactly as many tokens
for each prompt: by `generate`, waiting in each batch for its longest row, as its users must, and by
its continuous batching, which does not wait. The latter runs on a GPU, or with --continuous.

With --shape the model has random weights and prompts are random tokens: nothing is read from disk.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from replay_bench.shapes import SHAPES, write_config
from table import Row, finishing, parser, row
from workloads import OPEN_PROMPTS, chat, reasoning_prompts

from rollout import Rollout, RolloutEngine, SamplingParams

TEMPERATURE = 1.0

LENGTHS = (16, 256)
"""Tokens of the shortest and the longest rollout of a model of random weights, drawn evenly."""


def load_transformers(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval().to(device)


def continuous_seconds(model: Any, rollouts: list[Rollout], temperature: float) -> float:
    """Seconds transformers' continuous batching takes for the same, its start not counted.

    Raises RuntimeError where it ends before it has answered.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, eos_token_id=-1, pad_token_id=0
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
def transformers_seconds(model: Any, rollouts: list[Rollout], temperature: float) -> float:
    """Seconds transformers takes for one padded batch with these prompts and token counts."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    width = max(len(r.prompt_ids) for r in rollouts)
    device = model.device
    ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + r.prompt_ids for r in rollouts])
    mask = torch.tensor(
        [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in rollouts]
    )
    lengths = torch.tensor([len(r.token_ids) for r in rollouts], device=device)

    class EnoughTokens(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] - width >= lengths

    started = time.perf_counter()
    model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=int(lengths.max()),
        stopping_criteria=StoppingCriteriaList([EnoughTokens()]),
    )
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def batches(rollouts: list[Rollout], size: int) -> list[list[Rollout]]:
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def compare(
    name: str,
    engine: RolloutEngine,
    model: Any,
    prompts: list[Any],
    params: SamplingParams | list[SamplingParams],
    *,
    batch_sizes: tuple[int, ...],
    bar: float | None,
    repeats: int,
    continuous: bool,
) -> list[Row]:
    """Best of ``repeats`` on all sides; for `generate` the best of ``batch_sizes``."""
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
            parts = batches(rollouts, size)
            theirs.append(sum(transformers_seconds(model, p, TEMPERATURE) for p in parts))
        if continuous:
            continuously.append(continuous_seconds(model, rollouts, TEMPERATURE))
    tokens = sum(len(r.token_ids) for r in rollouts)
    rows = [
        row(f"{name}: specrollout", tokens / min(ours), "tokens/s"),
        row(f"{name}: transformers", tokens / min(theirs), "tokens/s"),
        row(f"{name}: ratio", min(theirs) / min(ours), "x", bar),
    ]
    if continuously:
        rows += [
            row(f"{name}: continuous batching", tokens / min(continuously), "tokens/s"),
            row(f"{name}: ratio to it", min(continuously) / min(ours), "x"),
        ]
    return rows


def shaped(name: str, device: str, *, exact: bool) -> tuple[RolloutEngine, Any]:
    """An engine and transformers' model of that shape, with the same random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), SHAPES[name])
        engine = RolloutEngine.from_pretrained(
            folder, spec="none", load_format="dummy", max_running=64, device=device, exact=exact
        )
        config = AutoConfig.from_pretrained(folder)
    dtype = engine.worker.model_dtype
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    engine.update_weights_from_tensor(model.state_dict().items())
    return engine, model


def shaped_rows(options: argparse.Namespace) -> Iterator[Row]:
    engine, model = shaped(options.shape, options.device, exact=not options.fast)
    randomness = random.Random(0)
    prompts = [
        [randomness.randrange(engine.vocab_size) for _ in range(randomness.randint(32, 256))]
        for _ in range(64)
    ]
    params = [
        SamplingParams(
            temperature=TEMPERATURE, max_new_tokens=randomness.randint(*LENGTHS), ignore_eos=True
        )
        for _ in prompts
    ]
    engine.generate(prompts[:2], SamplingParams(max_new_tokens=8, ignore_eos=True))  # warm
    for size in (1, 8, 32, 64):
        yield from compare(
            f"{options.shape}, batch {size}", engine, model, prompts[:size], params[:size],
            batch_sizes=(size,), bar=None, repeats=options.repeats, continuous=options.continuous,
        )  # fmt: skip


def model_rows(options: argparse.Namespace) -> Iterator[Row]:
    started = time.perf_counter()
    engine = RolloutEngine.from_pretrained(
        options.model,
        spec="none",
        max_running=64,
        device=options.device,
        exact=not options.fast,
    )
    yield row("load the model", time.perf_counter() - started, "s")
    dtype, device = engine.worker.model_dtype, engine.worker.model_device
    model = load_transformers(options.model, dtype, device)
    bars = {1: 1.3, 8: 1.3, 32: 1.5, 64: 2.0} if device.type == "cpu" and not options.fast else {}
    open_prompts = [chat(text) for text in OPEN_PROMPTS]
    tasks = reasoning_prompts(24)
    engine.generate(open_prompts[:2], SamplingParams(max_new_tokens=8))  # warm

    for size, prompts in ((1, tasks[:1]), (8, open_prompts), (32, open_prompts + tasks)):
        params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=128, seed=1)
        yield from compare(
            f"batch {size}, {dtype}", engine, model, prompts, params,
            batch_sizes=(size,), bar=bars.get(size), repeats=options.repeats,
            continuous=options.continuous,
        )  # fmt: skip
    group = [*open_prompts[:4], *tasks[:4]]
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=256, seed=2, n=8)
    yield from compare(
        f"8 prompts x 8 samples, {dtype}", engine, model, group, params,
        batch_sizes=(8, 64), bar=bars.get(64), repeats=1, continuous=options.continuous,
    )  # fmt: skip
    metrics = engine.metrics()
    yield row("engine time to first rollout", metrics.first_rollout_seconds or 0.0, "s")
    peak = metrics.peak_memory_bytes / 2**20
    yield row("peak memory, transformers' copy included", peak, "MiB")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=2)
    on_gpu = torch.cuda.is_available()
    arguments.add_argument("--device", default="cuda" if on_gpu else "cpu")
    arguments.add_argument("--fast", action="store_true", help="ours with exact=false")
    arguments.add_argument(
        "--continuous",
        action=argparse.BooleanOptionalAction,
        default=on_gpu,
        help="transformers' continuous batching too; it is made for GPUs",
    )
    arguments.add_argument("--shape", choices=SHAPES, help="random weights instead of --model")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    chosen = f"generate, {options.shape or options.model.name}, {options.device}"
    with finishing(f"{chosen}, {options.threads} threads", options.json) as rows:
        rows.extend(shaped_rows(options) if options.shape else model_rows(options))


if __name__ == "__main__":
    main()
