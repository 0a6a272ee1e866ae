"""A cluster of many replicas in ticks of a clock: who waits for whom.

Shape legend: N replicas, S requests that run on each.
"""

from __future__ import annotations

import enum
import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness.traces import load_trace
from numpy.typing import NDArray

from rollout.cluster.router import Router

TICK_SECONDS = 0.05
"""Between two looks at which rollouts have ended: what a cluster hears of its replicas."""

MAX_RUNNING = 64
"""Requests that run together on a replica."""

PROMPT_LEN = 512
NUM_STEPS = 3
PART = 0.9  # of a step's rollouts that end it, where partial

# A decode step reads all weights once and each request's KV once: memory-bound, as decoding is at
# these batch sizes. Prefill is left out: a group's prompt is computed once and is short beside its
# answers. 8.03 billion parameters in bfloat16 and 2 ms for launches, sampling and scheduling; 32
# layers of 8 KV heads of 128; 70 % of 3.35 TB/s.
STEP_SECONDS = 2e-3 + 16.06e9 / (0.7 * 3.35e12)
CONTEXT_TOKEN_SECONDS = 131_072 / (0.7 * 3.35e12)

GroupSampler = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Lengths of the n samples of one random prompt, in tokens."""

# Log-normal: log L = mean + between * prompt + within * sample, both normal. Fitted by moments to
# the 640 rollouts of 20 prompts of a trace with a long tail (mean 939, median 641, largest 4,232).
LOG_MEAN, BETWEEN_PROMPTS, WITHIN_PROMPT = 6.50, 0.77, 0.35
MAX_NEW_TOKENS = 8192  # where fitted lengths are cut


def fitted(rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    of_prompt = LOG_MEAN + BETWEEN_PROMPTS * rng.standard_normal()
    log_lengths = of_prompt + WITHIN_PROMPT * rng.standard_normal(num_samples)
    return np.clip(np.exp(log_lengths), 1, MAX_NEW_TOKENS).astype(np.int64)


def recorded(path: Path) -> GroupSampler:
    """Lengths of a trace (.npz) or a job's rollouts (.jsonl): random samples of a random prompt.

    In a file that holds each prompt once or twice, samples of one prompt come out too much alike.
    """
    by_prompt: dict[int, list[int]] = {}
    if path.suffix == ".npz":
        trace = load_trace(path)
        for prompt, response in zip(trace.prompt_of_R.tolist(), trace.responses, strict=True):
            by_prompt.setdefault(prompt, []).append(len(response))
    else:
        with path.open() as lines:
            for rollout in map(json.loads, lines):
                lengths = by_prompt.setdefault(rollout["prompt_index"], [])
                lengths.append(len(rollout["token_ids"]))
    if not by_prompt:
        raise FileNotFoundError(f"{path}: holds no rollouts")
    groups = [np.array(by_prompt[prompt], dtype=np.int64) for prompt in sorted(by_prompt)]

    def sample(rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
        return rng.choice(groups[rng.integers(len(groups))], num_samples)

    return sample


def accept_length(running: NDArray[np.int64], *, speculates: bool) -> NDArray[np.float64]:
    """Tokens a request gets per step: many where few run, one where drafts do not pay.

    An assumption: accept lengths of a few tokens were measured on recorded rollouts at small
    batches, and budgets close as batches get wide.
    """
    widths, accepted = np.log([1, 4, 16, 64, 256]), [2.8, 2.6, 2.2, 1.4, 1.0]
    found = np.interp(np.log(np.maximum(1, running)), widths, accepted)
    return found if speculates else np.ones_like(found)


class Policy(enum.StrEnum):
    SYNCHRONOUS = "synchronous"  # a step ends with its last rollout
    PARTIAL = "partial"  # it ends when most rollouts have; the others go on in the next
    STREAMING = "streaming"  # the next step's groups start as rollouts end


@dataclass(slots=True)
class _Rollout:
    group: int
    length: int
    remaining: float
    begun_in: int = -1  # step, of its first token
    ended_in: int = -1


@dataclass(slots=True, kw_only=True)
class Outcome:
    step_seconds: float
    idle: float  # share of replica time with nothing to run
    unused: float  # share of the time of MAX_RUNNING requests
    tail: float  # share of a step's time in which its last tenth of rollouts ends
    tokens_per_second: float  # a replica
    stale: float  # share of rollouts that began under older weights than those they ended under
    spread: float  # share of groups that ran on more than one replica


class Simulation:
    """All that run on a replica get the same number of tokens a step."""

    def __init__(
        self,
        num_replicas: int,
        lengths: GroupSampler,
        *,
        groups_per_step: int,
        samples: int,
        policy: Policy = Policy.SYNCHRONOUS,
        speculates: bool = True,
        max_running: int = MAX_RUNNING,
    ) -> None:
        self._lengths, self._policy = lengths, policy
        self._groups_per_step, self._samples = groups_per_step, samples
        self._rng = np.random.default_rng(0)
        names = [str(replica) for replica in range(num_replicas)]
        self._router = Router(names)
        for name in names:
            self._router.join(name, max_running)
        self._waiting: list[deque[int]] = [deque() for _ in names]  # by replica
        self._requests_NS = np.full((num_replicas, max_running), -1)  # -1: none
        self._remaining_NS = np.zeros((num_replicas, max_running))
        self._contexts_NS = np.zeros((num_replicas, max_running))
        self._accepted = accept_length(np.arange(max_running + 1), speculates=speculates)
        self._now = 0.0
        self._step = 0
        self._busy_seconds = self._request_seconds = 0.0  # summed over replicas, over requests
        self._rollouts: list[_Rollout] = []
        self._homes: dict[int, set[int]] = {}
        self._num_groups = 0
        self._unfinished = 0

    def run(self) -> Outcome:
        """The outcome of all steps but the first, which begins with nothing under way."""
        marks, tails = [], []
        for self._step in range(NUM_STEPS):
            began = almost = self._now
            self._submit(self._num_new_groups())
            goal, num_ended = self._goal(), 0
            while num_ended < goal:
                if num_ended < math.ceil(0.9 * goal):
                    almost = self._now + TICK_SECONDS
                num_ended += self._tick()
            tails.append((self._now - almost) / (self._now - began))
            if self._policy is Policy.PARTIAL:
                self._cut()
            marks.append(self._mark())
        return self._outcome(marks[0], marks[-1], tails[1:])

    def _num_new_groups(self) -> int:
        if self._policy is Policy.STREAMING and self._step == 0:
            return 2 * self._groups_per_step  # the first step's, and those to go on with
        if self._policy is Policy.PARTIAL:
            return max(1, round(self._groups_per_step - self._unfinished / self._samples))
        return self._groups_per_step

    def _goal(self) -> int:
        """Rollouts to end before the step does."""
        if self._policy is Policy.SYNCHRONOUS:
            return self._unfinished
        part = PART if self._policy is Policy.PARTIAL else 1
        return min(self._unfinished, round(self._groups_per_step * self._samples * part))

    def _submit(self, num_groups: int) -> None:
        for group in range(self._num_groups, self._num_groups + num_groups):
            for length in self._lengths(self._rng, self._samples).tolist():
                self._router.add(len(self._rollouts), _key(group))
                self._rollouts.append(_Rollout(group, length, float(length)))
                self._unfinished += 1
        self._num_groups += num_groups

    def _tick(self) -> int:
        """Move the clock to the next step; returns how many rollouts ended."""
        for name, requests in self._router.take().items():
            self._waiting[int(name)] += requests
        for replica, waiting in enumerate(self._waiting):
            if waiting:
                self._start(replica, waiting)
        runs_NS = self._requests_NS >= 0
        running_N = runs_NS.sum(1)
        step_seconds_N = STEP_SECONDS + CONTEXT_TOKEN_SECONDS * self._contexts_NS.sum(1)
        gained_N = TICK_SECONDS / step_seconds_N * self._accepted[running_N]
        gained_NS = np.where(runs_NS, gained_N[:, None], 0.0)
        self._remaining_NS -= gained_NS
        self._contexts_NS += gained_NS
        self._now += TICK_SECONDS
        self._busy_seconds += TICK_SECONDS * np.count_nonzero(running_N)
        self._request_seconds += TICK_SECONDS * running_N.sum()
        ends_NS = runs_NS & (self._remaining_NS <= 0)
        ended = self._requests_NS[ends_NS].tolist()
        for request in ended:
            self._router.remove(request)
            self._rollouts[request].ended_in = self._step
        self._empty(ends_NS)
        self._unfinished -= len(ended)
        return len(ended)

    def _start(self, replica: int, waiting: deque[int]) -> None:
        for index in np.flatnonzero(self._requests_NS[replica] < 0)[: len(waiting)].tolist():
            request = waiting.popleft()
            rollout = self._rollouts[request]
            if rollout.begun_in < 0:
                rollout.begun_in = self._step
            self._homes.setdefault(rollout.group, set()).add(replica)
            self._requests_NS[replica, index] = request
            self._remaining_NS[replica, index] = rollout.remaining
            emitted = rollout.length - rollout.remaining
            self._contexts_NS[replica, index] = PROMPT_LEN + emitted

    def _empty(self, ended_NS: NDArray[np.bool_]) -> None:
        self._requests_NS[ended_NS] = -1
        self._contexts_NS[ended_NS] = 0.0

    def _cut(self) -> None:
        """Unfinished rollouts go on in the next step, before those that come new."""
        for replica, waiting in enumerate(self._waiting):
            running_R = np.flatnonzero(self._requests_NS[replica] >= 0)
            running = self._requests_NS[replica, running_R].tolist()
            for request, remaining in zip(
                running, self._remaining_NS[replica, running_R], strict=True
            ):
                self._rollouts[request].remaining = float(remaining)
            for request in [*running, *waiting]:
                self._router.remove(request)
                self._router.add(request, _key(self._rollouts[request].group))
            waiting.clear()
        self._empty(self._requests_NS >= 0)

    def _mark(self) -> NDArray[np.float64]:
        """Time, seconds of busy replicas and of requests, tokens emitted."""
        emitted = sum(rollout.length for rollout in self._rollouts if rollout.ended_in >= 0)
        return np.array([self._now, self._busy_seconds, self._request_seconds, emitted])

    def _outcome(
        self, first: NDArray[np.float64], last: NDArray[np.float64], tails: list[float]
    ) -> Outcome:
        count, max_running = self._requests_NS.shape
        seconds, busy, request_seconds, emitted = (last - first).tolist()
        ended = [rollout for rollout in self._rollouts if rollout.ended_in >= 1]
        stale = sum(rollout.begun_in < rollout.ended_in for rollout in ended)
        return Outcome(
            step_seconds=seconds / (NUM_STEPS - 1),
            idle=1 - busy / (seconds * count),
            unused=1 - request_seconds / (seconds * count * max_running),
            tail=float(np.mean(tails)),
            tokens_per_second=emitted / seconds / count,
            stale=stale / len(ended),
            spread=sum(len(homes) > 1 for homes in self._homes.values()) / len(self._homes),
        )


def _key(group: int) -> int:
    """A group's key, spread over 64 bits as prompts' keys are."""
    return (group + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
