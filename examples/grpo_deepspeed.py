"""GRPO on DeepSpeed ZeRO, rolled out by the engine: one loop to start from.

    python examples/grpo_deepspeed.py
    torchrun --nproc-per-node 2 examples/grpo_deepspeed.py --zero 3

A step rolls out a group of samples per problem, scores them, updates the policy by the clipped
surrogate with group-normalised advantages (Shao et al. 2024; no KL term), and streams the new
weights into the engine. Rank 0 owns the engine and deals out the rollouts; every rank trains on
its share. Each step is a line of JSON in the log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, TextIO

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed reads it when imported

import deepspeed
import torch
import torch.distributed as dist
from sums_task import Problem, SumsTask
from token_tree import TokenTree
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.trainers import RolloutHook

ALONE = {  # a process group of one, on a free port
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="models/SmolLM2-135M-Instruct", help="a checkpoint folder")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the parameters")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage")
    add("--spec", choices=("none", "ngram"), default="ngram", help="how the engine drafts")
    add("--draft-tokens", type=int, help="always up to so many; else what pays, as it is learned")
    add("--steps", type=int, default=36, help="rollouts and updates")
    add("--prompts", type=int, default=8, help="problems per step, over all ranks")
    add("--samples", type=int, default=6, help="rollouts per problem")
    add("--epochs", type=int, default=1, help="optimizer steps per batch of rollouts")
    add("--terms", type=int, default=2, help="numbers in a sum")
    add("--shots", type=int, default=1, help="solved examples in the prompt")
    add("--max-new-tokens", type=int, default=16, help="of a rollout")
    add("--temperature", type=float, default=1.0, help="of rollouts")
    add("--lr", type=float, default=2e-5, help="of AdamW")
    add("--clip", type=float, default=0.2, help="the ratio counts within 1 - CLIP and 1 + CLIP")
    add("--held-out", type=int, default=48, help="problems evaluated before and after; 0: none")
    add("--seed", type=int, default=0, help="of problems and samples")
    add("--threads", type=int, default=1, help="CPU threads per process")
    add("--log", type=Path, default=Path("runs/grpo.jsonl"), help="a file")
    return parser.parse_args()


@dataclass
class Sample:
    """What a trainer needs of a rollout."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # the engine's: of the policy that sampled, at the run's temperature
    advantage: float


def make_trainer(args: argparse.Namespace) -> Any:
    """The model under DeepSpeed: float32 throughout, or bfloat16 with a float32 master."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "zero_optimization": {"stage": args.zero},
        "zero_force_ds_cpu_optimizer": False,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def make_engine(args: argparse.Namespace) -> RolloutEngine:
    fixed = {"budget": "fixed", "num_draft_tokens": args.draft_tokens}
    return RolloutEngine.from_pretrained(
        args.model,
        spec=args.spec,
        spec_options=fixed if args.draft_tokens else None,
        dtype=args.dtype,
        num_threads=args.threads,
        max_running=args.prompts * args.samples,
        max_context_len=1024,
        kv_bytes=2**30,
    )


def roll_out(
    engine: RolloutEngine, task: SumsTask, problems: Sequence[Problem], params: SamplingParams
) -> tuple[list[Rollout], list[float]]:
    rollouts = engine.generate([task.prompt(problem) for problem in problems], params)
    rewards = [task.reward(each.text, problems[each.prompt_index]) for each in rollouts]
    return rollouts, rewards


def evaluate(
    engine: RolloutEngine, task: SumsTask, params: SamplingParams, args: argparse.Namespace
) -> dict[str, float]:
    """Mean rewards on the held-out problems: sampled as in training, and greedy."""
    problems = task.held_out[: args.held_out]
    if not problems:
        return {}
    sampled = replace(params, n=4)
    greedy = replace(params, n=1, temperature=0.0)
    return {
        "sampled_reward": fmean(roll_out(engine, task, problems, sampled)[1]),
        "greedy_reward": fmean(roll_out(engine, task, problems, greedy)[1]),
        "majority_reward": task.majority_reward(problems),
    }


def group_advantages(rewards: Sequence[float], group_size: int) -> list[float]:
    advantages: list[float] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        center, scale = fmean(group), pstdev(group) + 1e-4
        advantages += [(reward - center) / scale for reward in group]
    return advantages


def as_samples(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> list[Sample]:
    return [
        Sample(each.prompt_ids, each.token_ids, each.logprobs, advantage)
        for each, advantage in zip(rollouts, advantages, strict=True)
    ]


def deal(samples: list[Sample], world_size: int) -> tuple[list[Sample], int]:
    """This rank's share of rank 0's samples, and the number of tokens of all of them.

    Samples of advantage 0 have no gradient: they are counted and not dealt out.
    """
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    samples = [sample for sample in samples if sample.advantage] or samples[:world_size]
    shares = [(samples[rank::world_size], num_tokens) for rank in range(world_size)]
    received: list[Any] = [None]
    dist.scatter_object_list(received, shares if samples else None)
    return received[0]


def update(trainer: Any, samples: list[Sample], num_tokens: int, args: argparse.Namespace) -> float:
    """One optimizer step; the largest |trainer - engine| logprob before it, over all ranks."""
    tree = TokenTree([sample.prompt_ids + sample.token_ids for sample in samples])
    nodes, behaviour, advantage = [], [], []
    for sample, path in zip(samples, tree.paths, strict=True):
        nodes += path[len(sample.prompt_ids) :]
        behaviour += sample.logprobs
        advantage += [sample.advantage] * len(sample.token_ids)
    behaviour_N, advantage_N = torch.tensor(behaviour), torch.tensor(advantage)

    logprobs_N = tree.logprobs(trainer, nodes, args.temperature)
    ratio_N = torch.exp(logprobs_N - behaviour_N)
    clipped_N = ratio_N.clamp(1 - args.clip, 1 + args.clip)
    objective = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).sum() / num_tokens
    trainer.backward(-objective * dist.get_world_size())  # deepspeed averages over ranks
    trainer.step()

    gap = (logprobs_N.detach() - behaviour_N).abs().max()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    return gap.item()


def write(file: TextIO, **fields: Any) -> None:
    """A line of the log, and of the terminal."""
    line = json.dumps(fields, default=str)
    print(line, file=file, flush=True)
    print(line, flush=True)


def digest(rollouts: Sequence[Rollout]) -> str:
    """Of every token and of the bits of every logprob."""
    data = hashlib.sha256()
    for each in rollouts:
        data.update(struct.pack(f"<{len(each.token_ids)}i", *each.token_ids))
        data.update(struct.pack(f"<{len(each.logprobs)}d", *each.logprobs))
    return data.hexdigest()


def describe(rollouts: Sequence[Rollout], rewards: Sequence[float]) -> dict[str, Any]:
    logprobs = [logprob for each in rollouts for logprob in each.logprobs]
    verify_steps = sum(each.stats.verify_steps for each in rollouts)
    return {
        "reward": fmean(rewards),
        "tokens": len(logprobs),
        "nll": -fmean(logprobs),
        "accept_length": 1 + sum(each.stats.accepted for each in rollouts) / verify_steps,
        "digest": digest(rollouts),
    }


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    for name, value in ALONE.items():  # torchrun has set them
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    world_size, leads = dist.get_world_size(), dist.get_rank() == 0

    trainer = make_trainer(args)
    engine = make_engine(args) if leads else None
    hook = RolloutHook(engine, trainer)
    if leads:
        task = SumsTask(args.terms, args.shots)
        params = SamplingParams(
            temperature=args.temperature, max_new_tokens=args.max_new_tokens, n=args.samples
        )
        args.log.parent.mkdir(parents=True, exist_ok=True)
        log = args.log.open("w")
        write(log, event="start", world_size=world_size, **vars(args))
        write(log, event="held out", step=0, **evaluate(engine, task, params, args))

    for step in range(1, args.steps + 1):
        started, cpu_started, samples = time.perf_counter(), time.process_time(), []
        if leads:
            problems = random.Random(f"{args.seed} {step}").sample(task.train, args.prompts)
            seeded = replace(params, seed=args.seed * 1_000_000 + step)
            rollouts, rewards = roll_out(engine, task, problems, seeded)
            samples = as_samples(rollouts, group_advantages(rewards, args.samples))
        share, num_tokens = deal(samples, world_size)
        rolled_out = time.perf_counter()
        gaps = [update(trainer, share, num_tokens, args) for _ in range(args.epochs)]
        trained = time.perf_counter()
        sync = hook.sync()
        if leads:
            write(
                log, event="step", step=step,
                **describe(rollouts, rewards), majority_reward=task.majority_reward(problems),
                logprob_gap=gaps[0], rollout_seconds=rolled_out - started,
                train_seconds=trained - rolled_out, sync_seconds=sync.seconds,
                cpu_seconds=time.process_time() - cpu_started,
            )  # fmt: skip
    if leads:
        write(log, event="held out", step=args.steps, **evaluate(engine, task, params, args))
        write(log, event="end", weights=engine.weights_digest())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
