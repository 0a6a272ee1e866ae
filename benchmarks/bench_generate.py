"""Plain decoding against transformers' generate: same model, dtype, prompts and token counts.

Our engine samples first, lengths as they fall; transformers then generates exactly as many tokens
for each prompt, waiting in each batch for its longest row, as its users must.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from table import Row, finish, parser, row
from workloads import OPEN_PROMPTS, chat, reasoning_prompts

from rollout import Rollout, RolloutEngine, SamplingParams


def load_transformers(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.inference_mode()
def transformers_seconds(model: Any, rollouts: list[Rollout], temperature: float) -> float:
    """Seconds transformers takes for one padded batch with these prompts and token counts."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    width = max(len(r.prompt_ids) for r in rollouts)
    ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + r.prompt_ids for r in rollouts])
    mask = torch.tensor(
        [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in rollouts]
    )
    lengths = torch.tensor([len(r.token_ids) for r in rollouts])

    class EnoughTokens(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return input_ids.shape[1] - width >= lengths

    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
        max_new_tokens=int(lengths.max()),
        stopping_criteria=StoppingCriteriaList([EnoughTokens()]),
    )
    return time.perf_counter() - started


def batches(rollouts: list[Rollout], size: int) -> list[list[Rollout]]:
    return [rollouts[i : i + size] for i in range(0, len(rollouts), size)]


def compare(
    name: str,
    engine: RolloutEngine,
    model: Any,
    prompts: list[Any],
    params: SamplingParams,
    *,
    batch_sizes: tuple[int, ...],
    bar: float,
    repeats: int,
) -> list[Row]:
    """Best of ``repeats`` on both sides; for transformers the best of ``batch_sizes``."""
    ours: list[float] = []
    theirs: list[float] = []
    rollouts: list[Rollout] = []
    for _ in range(repeats):
        engine.flush_cache()
        started = time.perf_counter()
        rollouts = engine.generate(prompts, params)
        ours.append(time.perf_counter() - started)
        for size in batch_sizes:
            parts = batches(rollouts, size)
            theirs.append(sum(transformers_seconds(model, p, params.temperature) for p in parts))
    tokens = sum(len(r.token_ids) for r in rollouts)
    return [
        row(f"{name}: specrollout", tokens / min(ours), "tokens/s"),
        row(f"{name}: transformers", tokens / min(theirs), "tokens/s"),
        row(f"{name}: ratio", min(theirs) / min(ours), "x", bar),
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--repeats", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)

    started = time.perf_counter()
    engine = RolloutEngine.from_pretrained(options.model, spec="none", max_running=64)
    loaded = time.perf_counter() - started
    dtype = engine.worker.model_dtype
    model = load_transformers(options.model, dtype)
    open_prompts = [chat(text) for text in OPEN_PROMPTS]
    tasks = reasoning_prompts(24)
    engine.generate(open_prompts[:2], SamplingParams(max_new_tokens=8))  # warm

    rows = [row("load the model", loaded, "s")]
    for size, prompts in ((1, tasks[:1]), (8, open_prompts), (32, open_prompts + tasks)):
        params = SamplingParams(temperature=1.0, max_new_tokens=128, seed=1)
        rows += compare(
            f"batch {size}", engine, model, prompts, params,
            batch_sizes=(size,), bar=1.5 if size == 32 else 1.3, repeats=options.repeats,
        )  # fmt: skip
    group = [*open_prompts[:4], *tasks[:4]]
    params = SamplingParams(temperature=1.0, max_new_tokens=256, seed=2, n=8)
    rows += compare(
        "8 prompts x 8 samples", engine, model, group, params,
        batch_sizes=(8, 64), bar=2.0, repeats=1,
    )  # fmt: skip
    metrics = engine.metrics()
    rows += [
        row("engine time to first rollout", metrics.first_rollout_seconds or 0.0, "s"),
        row("peak memory, transformers' copy included", metrics.peak_memory_bytes / 2**20, "MiB"),
    ]
    finish(f"generate, {dtype}, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
