"""Samples the demo model into a trace of rollouts that hardly repeat themselves.

    python benchmarks/sample_trace.py runs/sampled.npz

Reports the nats per token; open prompts at a high temperature are the hardest case for drafts.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from workloads import OPEN_PROMPTS, chat

from rollout import Rollout, RolloutEngine, SamplingParams

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=56, n=16)
EPOCHS = 2


def sample_trace(
    model: Path, path: Path, params: SamplingParams = PARAMS, epochs: int = EPOCHS
) -> None:
    """Write open prompts x ``params.n`` samples x ``epochs``, an epoch being one step, to ``path``.

    The file is what `traces.load_trace` describes, with `resp_logprob` beside `resp_tokens` and
    `resp_sample` beside `resp_prompt`.
    """
    engine = RolloutEngine.from_pretrained(
        str(model), spec="none", dtype="bfloat16", max_running=64, kv_bytes=1 << 30
    )
    prompts = [chat(text) for text in OPEN_PROMPTS]
    rollouts: list[Rollout] = []
    for epoch in range(epochs):
        rollouts += engine.generate(prompts, replace(params, seed=params.seed + epoch))
    prompt_ids = {rollout.prompt_index: rollout.prompt_ids for rollout in rollouts}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        prompt_tokens=_flat([prompt_ids[i] for i in range(len(prompts))], np.int32),
        prompt_off=_offsets([prompt_ids[i] for i in range(len(prompts))]),
        resp_tokens=_flat([rollout.token_ids for rollout in rollouts], np.int32),
        resp_off=_offsets([rollout.token_ids for rollout in rollouts]),
        resp_logprob=_flat([rollout.logprobs for rollout in rollouts], np.float32),
        resp_prompt=np.array([rollout.prompt_index for rollout in rollouts]),
        resp_sample=np.array([rollout.sample_index for rollout in rollouts]),
        resp_epoch=np.repeat(np.arange(epochs), len(rollouts) // epochs),
        resp_step=np.repeat(np.arange(epochs), len(rollouts) // epochs),
        temperature=params.temperature,
    )


def nats_per_token(path: Path) -> float:
    """Of a trace with `resp_logprob`."""
    with np.load(path) as arrays:
        return -float(arrays["resp_logprob"].mean())


def _flat(lists: list, dtype: type) -> np.ndarray:
    return np.concatenate([np.array(values, dtype) for values in lists])


def _offsets(lists: list) -> np.ndarray:
    return np.cumsum([0, *map(len, lists)])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("path", type=Path, help="the .npz to write")
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--temperature", type=float, default=PARAMS.temperature)
    arguments.add_argument("--samples", type=int, default=PARAMS.n, help="of each prompt")
    arguments.add_argument("--epochs", type=int, default=EPOCHS)
    arguments.add_argument("--max-new-tokens", type=int, default=PARAMS.max_new_tokens)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    params = SamplingParams(
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        n=options.samples,
    )
    sample_trace(options.model, options.path, params, options.epochs)
    print(f"{options.path}: {nats_per_token(options.path):.2f} nats a token")


if __name__ == "__main__":
    main()
