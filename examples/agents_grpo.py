"""GRPO over conversations of several turns: verifiers rolls out against a server, torch trains.

    python examples/agents_grpo.py

verifiers plays an environment against `specrollout serve`. Its token client begins each turn with
the very ids of the turns before. This process updates the policy and sends the weights to the
server. Every turn has its own seed, so the same command gives the same run, whatever is drafted and
in whichever order the requests arrive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
import verifiers.legacy as vf
from corrections_env import CorrectionsEnv, conversation
from grpo_log import Log, digest
from safetensors.torch import save
from sums_task import Problem, SumsTask
from token_tree import TokenTree
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Turn:
    """One answer of the policy: a step of a conversation."""

    prompt_ids: list[int]  # all that came before, the environment's answers included
    token_ids: list[int]
    logprobs: list[float]
    advantage: float  # of its conversation


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="models/SmolLM2-135M-Instruct", help="a checkpoint folder")
    add("--spec", choices=("none", "ngram"), default="ngram", help="where drafts come from")
    add("--draft-tokens", type=int, metavar="N", help="always up to N; without it, what pays")
    add("--steps", type=int, default=18, help="rollouts and updates")
    add("--prompts", type=int, default=8, help="problems per step")
    add("--samples", type=int, default=6, help="conversations per problem")
    add("--turns", type=int, default=3, help="of a conversation, at most")
    add("--max-new-tokens", type=int, default=16, help="of a turn")
    add("--lr", type=float, default=2e-5, help="of AdamW")
    add("--held-out", type=int, default=16, help="problems to evaluate on, before and after")
    add("--seed", type=int, default=0, help="of problems and samples")
    add("--threads", type=int, default=1, help="CPU threads of the trainer and of the server")
    add("--port", type=int, default=30000, help="of the server that is started")
    add("--output", type=Path, default=Path("runs/agents.jsonl"), help="the log, JSON lines")
    args = parser.parse_args()
    if args.spec == "none" and args.draft_tokens is not None:
        parser.error("--draft-tokens: --spec none drafts nothing")
    return args


@contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
    """`specrollout serve` beside this process; its address."""
    command = [
        str(Path(sys.executable).with_name("specrollout")), "serve",
        f"model.path={args.model}", "model.dtype=float32", f"num_threads={args.threads}",
        f"spec={args.spec}", f"server.port={args.port}",
    ]  # fmt: skip
    if args.draft_tokens:
        command += ["spec.budget=fixed", f"spec.num_draft_tokens={args.draft_tokens}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{args.port}"
    try:
        while True:
            try:
                call(url, "/health")
                break
            except URLError:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def call(url: str, path: str, body: bytes | None = None) -> bytes:
    """The server's answer; bytes of safetensors are the only body that is sent here."""
    request = Request(url + path, body, {"Content-Type": "application/octet-stream"})
    with urlopen(request) as answer:
        return answer.read()


def counters(url: str) -> dict[str, int]:
    """Totals of the server's engine, such as tokens generated and forwards of the target."""
    return json.loads(call(url, "/status"))["engine"]["total"]


def converse(
    env: CorrectionsEnv, url: str, args: argparse.Namespace, problems: Sequence[Problem], seed: int
) -> list[dict[str, Any]]:
    """Rollouts of verifiers, ``--samples`` of each problem, those of one problem together."""
    inputs = [
        conversation(problem, seed + args.turns * (args.samples * index + sample), index)
        for index, problem in enumerate(problems)
        for sample in range(args.samples)
    ]
    outputs = env.generate_sync(
        inputs,
        vf.ClientConfig(
            client_type="openai_chat_completions_token",
            api_key_var="VERIFIERS_KEY",
            api_base_url=f"{url}/v1",
        ),
        model="default",
        sampling_args={"temperature": 1.0, "max_tokens": args.max_new_tokens},
        state_columns=["trajectory", "info"],
        on_start=lambda *_: None,  # no progress bar for each step
        on_progress=lambda *_: None,
    )["outputs"]
    for each in outputs:
        if each.get("error"):
            raise SystemExit(f"a conversation failed: {each['error']}")
    return sorted(outputs, key=lambda each: each["info"]["seed"])


def turns_of(outputs: Sequence[dict[str, Any]]) -> list[Turn]:
    """All turns; each has its conversation's reward less its group's mean, in deviations."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for each in outputs:
        rewards[each["example_id"]].append(each["reward"])
    turns = []
    for each in outputs:
        group = rewards[each["example_id"]]
        advantage = (each["reward"] - fmean(group)) / (pstdev(group) + 1e-4)
        for step in each["trajectory"]:
            tokens = step["tokens"]
            turns.append(
                Turn(
                    tokens["prompt_ids"],
                    tokens["completion_ids"],
                    tokens["completion_logprobs"],
                    advantage,
                )
            )
    return turns


def continued(outputs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Turns that begin with the very ids of the turn before, and all later turns."""
    same = later = 0
    for each in outputs:
        steps = [step["tokens"] for step in each["trajectory"]]
        for before, after in pairwise(steps):
            ids = before["prompt_ids"] + before["completion_ids"]
            same += after["prompt_ids"][: len(ids)] == ids
            later += 1
    return same, later


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, turns: Sequence[Turn]
) -> float:
    """One optimizer step. Returns the largest |trainer - engine| logprob before it.

    What conversations have in common, and each turn's beginning, is computed once.
    """
    num_tokens = sum(len(turn.token_ids) for turn in turns)
    turns = [turn for turn in turns if turn.advantage] or turns
    tree = TokenTree([turn.prompt_ids + turn.token_ids for turn in turns])
    nodes: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    for turn, path in zip(turns, tree.paths, strict=True):
        nodes += path[len(turn.prompt_ids) :]
        behaviour += turn.logprobs
        advantages += [turn.advantage] * len(turn.token_ids)
    behaviour_N = torch.tensor(behaviour)
    logprobs_N = tree.logprobs(model, nodes)
    ratios_N = torch.exp(logprobs_N - behaviour_N)  # all but 1: a step's rollouts are used once
    loss = -(ratios_N * torch.tensor(advantages)).sum() / num_tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (logprobs_N.detach() - behaviour_N).abs().max().item()


def send_weights(model: torch.nn.Module, url: str) -> None:
    """Every parameter, in one call: one transaction of the engine. Tied tensors go once."""
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    call(url, "/update_weights_from_tensor", save(tensors))


def evaluate(env: CorrectionsEnv, url: str, args: argparse.Namespace, task: SumsTask) -> Any:
    """On held-out problems, sampled as in training."""
    outputs = converse(env, url, args, task.held_out[: args.held_out], seed=-(2**30))
    return {
        "reward": fmean(each["reward"] for each in outputs),
        "solved_in_turn_1": fmean(each["reward"] == 1 for each in outputs),
        "solved": fmean(each["reward"] > 0 for each in outputs),
    }


def main() -> None:
    args = parse_arguments()
    os.environ.setdefault("VERIFIERS_KEY", "none")  # the server has none
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    task = SumsTask(terms=2, shots=0)
    env = CorrectionsEnv(task, args.turns)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    with server(args) as url:
        log = Log(args.output)
        log.write("start", **vars(args))
        log.write("held out", step=0, **evaluate(env, url, args, task))
        for step in range(1, args.steps + 1):
            problems = random.Random(f"{args.seed} {step}").sample(task.train, args.prompts)
            started, before = time.perf_counter(), counters(url)
            outputs = converse(env, url, args, problems, (args.seed * 1000 + step) * 100_000)
            after, turns = counters(url), turns_of(outputs)
            rolled_out = time.perf_counter()
            gap = update(model, optimizer, turns)
            trained = time.perf_counter()
            send_weights(model, url)
            same, later = continued(outputs)
            made = {name: after[name] - before[name] for name in COUNTED}
            log.write(
                "step",
                step=step,
                reward=fmean(each["reward"] for each in outputs),
                turns=len(turns) / len(outputs),
                turns_continued=f"{same} of {later}",
                tokens=sum(len(turn.token_ids) for turn in turns),
                nll=-fmean(logprob for turn in turns for logprob in turn.logprobs),
                accept_length=made["generated_tokens"] / made["target_forwards"],
                cached=made["cached_tokens"] / made["prompt_tokens"],
                digest=digest(turns),
                logprob_gap=gap,
                rollout_seconds=rolled_out - started,
                train_seconds=trained - rolled_out,
                sync_seconds=time.perf_counter() - trained,
            )
        log.write("held out", step=args.steps, **evaluate(env, url, args, task))


COUNTED = ("generated_tokens", "target_forwards", "cached_tokens", "prompt_tokens")

if __name__ == "__main__":
    main()
