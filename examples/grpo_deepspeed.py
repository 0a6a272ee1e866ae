"""GRPO on DeepSpeed ZeRO, rolled out by the engine: a loop to start your own from.

    python examples/grpo_deepspeed.py
    torchrun --nproc-per-node 2 examples/grpo_deepspeed.py --zero 3

A step rolls out a group of samples per problem, scores them, updates the policy by the clipped
surrogate with group-normalised advantages (Shao et al. 2024; no KL term), and streams the new
weights into the engine. Rank 0 owns the engine and deals out the rollouts; every rank trains on
its share. The same seed gives the same run, whatever is drafted.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # deepspeed reads it when imported

import deepspeed
import torch
import torch.distributed as dist
from grpo_log import Log, describe
from sums_task import Problem, SumsTask
from token_tree import TokenTree
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.trainers import RolloutHook
from rollout.trainers.deepspeed import prepare_deepspeed
from rollout.trainers.exact import exact_forward
from rollout.trainers.mismatch.periodic import PeriodicProbe
from spec_workers.draft_training.co_training import CoTrainer
from spec_workers.draft_training.config import CoTrainingConfig

Sample = tuple[Rollout, float]  # and its advantage

NEURAL = ("eagle", "block")  # specs whose draft can be trained along

ALONE = {  # what torchrun would set: one process, on a free port
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
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the parameters")
    add("--zero", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage")
    choices = ("none", "ngram", *NEURAL)
    add("--spec", choices=choices, default="ngram", help="where drafts come from")
    add("--draft", help="a folder: the draft of --spec eagle (EAGLE-3) or block")
    add("--co-train", type=int, metavar="N", help="train that draft too, N updates a step")
    add("--draft-tokens", type=int, metavar="N", help="always up to N; without it, what pays")
    add("--steps", type=int, default=36, help="rollouts and updates")
    add("--prompts", type=int, default=8, help="problems per step")
    add("--samples", type=int, default=6, help="rollouts per problem")
    add("--epochs", type=int, default=1, help="optimizer steps on the rollouts of a step")
    add("--terms", type=int, default=2, help="numbers in a sum")
    add("--shots", type=int, default=0, help="solved examples in the prompt")
    add("--max-new-tokens", type=int, default=16, help="of a rollout")
    add("--temperature", type=float, default=1.0, help="of the rollouts")
    add("--lr", type=float, default=1e-5, help="of AdamW")
    add("--clip", type=float, default=0.2, help="ratios count within 1 - CLIP and 1 + CLIP")
    add("--held-out", type=int, default=48, help="problems to evaluate on, before and after")
    add("--seed", type=int, default=0, help="of problems and samples")
    add(
        "--exact",
        action="store_true",
        help="train on exactly the engine's logprobs: first ratios are 1",
    )
    add("--probe", type=int, metavar="N", help="compare trainer and engine every N steps")
    add("--threads", type=int, default=1, help="CPU threads per process")
    add("--output", type=Path, default=Path("runs/grpo.jsonl"), help="the log, JSON lines")
    args = parser.parse_args()
    if args.held_out < 1:
        parser.error(f"--held-out {args.held_out}: must be at least 1")
    if args.probe is not None and (args.zero == 3 or int(os.environ.get("WORLD_SIZE", 1)) > 1):
        parser.error("--probe: needs one process, and --zero 0 to 2")
    for name in ("co_train", "draft_tokens", "probe"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.spec in NEURAL and args.draft is None:
        parser.error(f"--spec {args.spec}: needs --draft FOLDER")
    for name in ("draft", "co_train"):
        if args.spec not in NEURAL and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')}: goes with --spec {' or '.join(NEURAL)}")
    if args.spec == "none" and args.draft_tokens is not None:
        parser.error("--draft-tokens: --spec none drafts nothing")
    if args.draft is not None and not Path(args.draft, "config.json").is_file():
        parser.error(f"--draft {args.draft}: no draft there")
    return args


def make_trainer(args: argparse.Namespace) -> Any:
    """The model under DeepSpeed: float32 throughout, or bfloat16 with a float32 master."""
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "zero_optimization": {"stage": args.zero, "reduce_bucket_size": 2**25},
        "zero_force_ds_cpu_optimizer": False,  # torch's needs no compiler
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def make_engine(args: argparse.Namespace) -> RolloutEngine:
    options: dict[str, Any] = {}
    if args.draft_tokens:
        options |= {"budget": "fixed", "num_draft_tokens": args.draft_tokens}
    if args.draft:
        options |= {"draft_path": args.draft}
    if args.co_train:
        options |= {"feature_ring": {"num_bytes": 2**27}}
    return RolloutEngine.from_pretrained(
        args.model,
        spec=args.spec,
        spec_options=options,
        dtype=args.dtype,
        num_threads=args.threads,
        max_running=args.prompts * args.samples,
        kv_bytes=2**28,
    )


def roll_out(
    engine: RolloutEngine, task: SumsTask, problems: Sequence[Problem], params: SamplingParams
) -> tuple[list[Rollout], list[float]]:
    """Rollouts and their rewards, those of one problem together."""
    rollouts = engine.generate([task.prompt(problem) for problem in problems], params)
    return rollouts, [
        task.reward(each.text or "", problems[each.prompt_index]) for each in rollouts
    ]


def evaluate(engine: RolloutEngine, task: SumsTask, params: SamplingParams, count: int) -> Any:
    """Mean rewards on held-out problems: sampled as in training, and greedy."""
    problems = task.held_out[:count]
    sampled, greedy = replace(params, n=4), replace(params, n=1, temperature=0.0)
    return {
        "sampled_reward": fmean(roll_out(engine, task, problems, sampled)[1]),
        "greedy_reward": fmean(roll_out(engine, task, problems, greedy)[1]),
        "majority_reward": task.majority_reward(problems),
    }


def compare_drafts(
    engine: RolloutEngine,
    first: Mapping[str, torch.Tensor],
    task: SumsTask,
    params: SamplingParams,
    count: int,
) -> dict[str, Any]:
    """Accept lengths on held-out problems, of the draft there is and of the first one there was.

    The rollouts are the same, bit for bit: drafts do not show in them.
    """
    fresh = replace(params, n=4, seed=-1)
    co_trained = describe(roll_out(engine, task, task.held_out[:count], fresh)[0])
    engine.update_weights_from_tensor(first, selector="draft")
    frozen = describe(roll_out(engine, task, task.held_out[:count], fresh)[0])
    return {
        "tokens": frozen["tokens"],
        "accept_length_co_trained": co_trained["accept_length"],
        "accept_length_frozen": frozen["accept_length"],
        "same": co_trained["digest"] == frozen["digest"],
    }


def with_advantages(
    rollouts: Sequence[Rollout], rewards: Sequence[float], group_size: int
) -> list[Sample]:
    """Each reward less its group's mean, in its group's standard deviations."""
    samples: list[Sample] = []
    for start in range(0, len(rollouts), group_size):
        group = rewards[start : start + group_size]
        mean, deviation = fmean(group), pstdev(group) + 1e-4
        advantages = [(reward - mean) / deviation for reward in group]
        samples += zip(rollouts[start : start + group_size], advantages, strict=True)
    return samples


def deal(samples: list[Sample], world_size: int) -> tuple[list[Sample], int]:
    """This rank's share of rank 0's samples, and the number of tokens of all of them.

    Samples of advantage 0 have no gradient: they are counted and not dealt out.
    """
    num_tokens = sum(len(rollout.token_ids) for rollout, _ in samples)
    dealt = [sample for sample in samples if sample[1]]
    if len(dealt) < world_size:  # every rank takes part in the collectives of an update
        dealt = samples
    shares = [(dealt[rank::world_size], num_tokens) for rank in range(world_size)]
    received: list[Any] = [None]
    dist.scatter_object_list(received, shares if samples else None)
    return received[0]


def update(trainer: Any, samples: list[Sample], num_tokens: int, args: argparse.Namespace) -> float:
    """One optimizer step. Returns the largest |trainer - engine| logprob before it, of any rank."""
    tree = TokenTree([rollout.prompt_ids + rollout.token_ids for rollout, _ in samples])
    nodes: list[int] = []
    engine_logprobs: list[float] = []
    advantages: list[float] = []
    for (rollout, advantage), path in zip(samples, tree.paths, strict=True):
        nodes += path[len(rollout.prompt_ids) :]
        engine_logprobs += rollout.logprobs
        advantages += [advantage] * len(rollout.token_ids)
    behaviour_N, advantages_N = torch.tensor(engine_logprobs), torch.tensor(advantages)

    logprobs_N = tree.logprobs(trainer, nodes, args.temperature, exact=args.exact)
    ratios_N = torch.exp(logprobs_N - behaviour_N)
    clipped_N = ratios_N.clamp(1 - args.clip, 1 + args.clip)
    surrogate = torch.minimum(ratios_N * advantages_N, clipped_N * advantages_N).sum() / num_tokens
    trainer.backward(-surrogate * dist.get_world_size())  # of which deepspeed takes the mean
    trainer.step()

    gap = (logprobs_N.detach() - behaviour_N).abs().max()
    dist.all_reduce(gap, dist.ReduceOp.MAX)
    return gap.item()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    prepare_deepspeed()  # nothing is compiled
    world_size = dist.get_world_size()

    trainer = make_trainer(args)
    engine = make_engine(args) if dist.get_rank() == 0 else None  # others only train
    hook = RolloutHook(engine, trainer)
    contexts = ExitStack()
    if args.exact:
        contexts.enter_context(exact_forward(trainer))
    params = SamplingParams(
        temperature=args.temperature, max_new_tokens=args.max_new_tokens, n=args.samples
    )
    if engine is not None:
        task = SumsTask(args.terms, args.shots)
        log = Log(args.output)
        log.write("start", world_size=world_size, **vars(args))
        log.write("held out", step=0, **evaluate(engine, task, params, args.held_out))
    probe, co_trainer = None, None
    if engine is not None and args.probe:
        probe = PeriodicProbe(engine, args.probe, temperature=args.temperature)
    if engine is not None and args.co_train:
        co_trainer = CoTrainer(engine, CoTrainingConfig(steps=args.co_train, seconds=None))
        co_trainer.skip()  # the evaluation is not to be trained on
        first_draft = co_trainer.swap.read()

    for step in range(1, args.steps + 1):
        started, cpu_started, samples = time.perf_counter(), time.process_time(), []
        co_train_seconds = 0.0
        if engine is not None:
            problems = random.Random(f"{args.seed} {step}").sample(task.train, args.prompts)
            of_this_step = replace(params, seed=args.seed * 1_000_000 + step)
            rollouts, rewards = roll_out(engine, task, problems, of_this_step)
            samples = with_advantages(rollouts, rewards, args.samples)
            if probe is not None and (found := probe.step(trainer, rollouts)) is not None:
                log.write("probe", step=step, **found.to_json())
            if co_trainer is not None:
                co_train_seconds = co_trainer.run().seconds
        share, num_tokens = deal(samples, world_size)
        rolled_out = time.perf_counter()
        gaps = [update(trainer, share, num_tokens, args) for _ in range(args.epochs)]
        trained = time.perf_counter()
        sync = hook.sync()
        if engine is not None:
            log.write(
                "step",
                step=step,
                reward=fmean(rewards),
                majority_reward=task.majority_reward(problems),
                **describe(rollouts),
                logprob_gap=gaps[0],
                rollout_seconds=rolled_out - started - co_train_seconds,
                co_train_seconds=co_train_seconds,
                train_seconds=trained - rolled_out,
                sync_seconds=sync.seconds,
                cpu_seconds=time.process_time() - cpu_started,
                **({} if co_trainer is None else {"draft": co_trainer.counters()}),
            )

    if engine is not None:
        log.write("held out", step=args.steps, **evaluate(engine, task, params, args.held_out))
        if co_trainer is not None:
            log.write("drafts", **compare_drafts(engine, first_draft, task, params, args.held_out))
        log.write("end", weights=engine.weights_digest())
    contexts.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
