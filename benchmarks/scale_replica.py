"""One replica from event to event: how long its rollouts get, and what a decode step costs it."""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GroupSampler = Callable[[np.random.Generator, int], NDArray[np.int64]]
"""Lengths of the n samples of one random prompt, in tokens."""

# Log-normal: log L = mean + between * prompt + within * sample, both normal. Fitted by moments to
# the 640 rollouts of 20 prompts of a trace with a long tail (mean 939, median 641, largest 4,232).
LOG_MEAN, BETWEEN_PROMPTS, WITHIN_PROMPT = 6.50, 0.77, 0.35
MAX_NEW_TOKENS = 8192  # where fitted lengths are cut


def fitted(rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
    log_lengths = (
        LOG_MEAN
        + BETWEEN_PROMPTS * rng.standard_normal()
        + WITHIN_PROMPT * rng.standard_normal(num_samples)
    )
    return np.clip(np.exp(log_lengths), 1, MAX_NEW_TOKENS).astype(np.int64)


def recorded(path: Path) -> GroupSampler:
    """Lengths of a trace (.npz) or a job's rollouts (.jsonl): random samples of a random prompt.

    In a file that holds each prompt once or twice, samples of one prompt come out too much alike.
    """
    by_prompt: dict[int, list[int]] = {}
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            found = zip(arrays["resp_prompt"].tolist(), np.diff(arrays["resp_off"]), strict=True)
            for prompt, length in found:
                by_prompt.setdefault(prompt, []).append(int(length))
    else:
        with path.open() as lines:
            for line in lines:
                rollout = json.loads(line)
                lengths = by_prompt.setdefault(rollout["prompt_index"], [])
                lengths.append(len(rollout["token_ids"]))
    if not by_prompt:
        raise FileNotFoundError(f"{path}: holds no rollouts")
    groups = [np.array(by_prompt[prompt], dtype=np.int64) for prompt in sorted(by_prompt)]

    def sample(rng: np.random.Generator, num_samples: int) -> NDArray[np.int64]:
        return rng.choice(groups[rng.integers(len(groups))], num_samples)

    return sample


class Cost(NamedTuple):
    """Seconds of a decode step, which reads all weights once and each request's KV once:
    memory-bound, as decoding is at these batch sizes. Prefill is left out: a group's prompt is
    computed once and is short beside its answers."""

    base: float  # reading the weights; launches, sampling, scheduling
    per_context_token: float


# 8.03 billion parameters in bfloat16 and 2 ms; 32 layers of 8 KV heads of 128; 70 % of 3.35 TB/s.
LLAMA_8B = Cost(2e-3 + 16.06e9 / (0.7 * 3.35e12), 131_072 / (0.7 * 3.35e12))


def accept_length(running: int, *, speculates: bool) -> float:
    """Tokens a request gets per step: many where few run, one where drafts do not pay.

    An assumption: accept lengths of a few tokens were measured on recorded rollouts at small
    batches, and budgets close as batches get wide.
    """
    if not speculates:
        return 1.0
    widths, accepted = np.log([1, 4, 16, 64, 256]), [2.8, 2.6, 2.2, 1.4, 1.0]
    return float(np.interp(np.log(running), widths, accepted))


class SimulatedReplica:
    """All that run get the same number of tokens a step, so one number says how far all are.

    Between two changes of who runs, n steps take ``n * (base + kv * contexts)`` and
    ``kv * gain * n**2 / 2`` seconds, where the contexts grow by ``gain`` tokens a step.
    """

    def __init__(self, cost: Cost, seats: int, *, speculates: bool) -> None:
        """``seats``: requests that run together; others wait here."""
        self._cost = cost
        self._seats = seats
        # By how many run.
        self._accepted = [1.0] + [
            accept_length(running, speculates=speculates) for running in range(1, seats + 1)
        ]
        self._now = 0.0
        self._progress = 0.0  # tokens that a request running since the start would have
        self._contexts = 0.0  # tokens, of all that run
        self._ends: list[tuple[float, int]] = []  # (progress, request), a heap
        self._context_at_end: dict[int, float] = {}
        self._waiting: deque[tuple[int, int, int]] = deque()
        self.busy_seconds = 0.0
        self.seat_seconds = 0.0  # running requests, integrated
        self.version = 0  # counts changes: an event planned for another is stale

    @property
    def num_running(self) -> int:
        return len(self._ends)

    def start(self, request: int, context: int, remaining: int) -> None:
        """``context``: tokens it has; ``remaining``: tokens it is going to emit."""
        if self.num_running == self._seats:
            self._waiting.append((request, context, remaining))
            return
        heapq.heappush(self._ends, (self._progress + remaining, request))
        self._context_at_end[request] = context + remaining
        self._contexts += context
        self.version += 1

    def advance(self, now: float) -> list[int]:
        """Requests that ended by then."""
        ended: list[int] = []
        while self._ends:
            seconds = self._seconds_to(self._ends[0][0])
            if self._now + seconds > now + 1e-9:
                self._run(self._steps_in(now - self._now), now - self._now)
                break
            progress, request = self._ends[0]
            self._run((progress - self._progress) / self._accept, seconds)
            self._progress = progress
            heapq.heappop(self._ends)
            self._contexts -= self._context_at_end.pop(request)
            ended.append(request)
            self.version += 1
            if self._waiting:
                self.start(*self._waiting.popleft())
        self._now = now
        return ended

    def next_end(self) -> float:
        """When the next one ends, if nothing changes."""
        return self._now + self._seconds_to(self._ends[0][0]) if self._ends else math.inf

    def stop_all(self) -> dict[int, float]:
        """Stop all requests; the tokens that each had yet to emit."""
        left = {request: progress - self._progress for progress, request in self._ends}
        left |= {request: float(remaining) for request, _, remaining in self._waiting}
        self._waiting.clear()
        self._ends, self._context_at_end, self._contexts = [], {}, 0.0
        self.version += 1
        return left

    @property
    def _accept(self) -> float:
        return self._accepted[len(self._ends)]

    def _coefficients(self) -> tuple[float, float]:
        """Seconds of n steps are ``a * n**2 + b * n``."""
        base, kv = self._cost
        gain = len(self._ends) * self._accept
        return kv * gain / 2, base + kv * self._contexts

    def _seconds_to(self, progress: float) -> float:
        steps = (progress - self._progress) / self._accept
        a, b = self._coefficients()
        return a * steps * steps + b * steps

    def _steps_in(self, seconds: float) -> float:
        a, b = self._coefficients()
        return 2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))

    def _run(self, steps: float, seconds: float) -> None:
        gained = steps * self._accept
        self._progress += gained
        self._contexts += gained * self.num_running
        self.busy_seconds += seconds
        self.seat_seconds += seconds * self.num_running
        self._now += seconds
