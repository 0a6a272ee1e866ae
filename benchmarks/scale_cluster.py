"""A cluster of many replicas as a discrete-event simulation: who waits for whom."""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scale_replica import Cost, GroupSampler, SimulatedReplica

from rollout.cluster.router import Router

TICK_SECONDS = 0.05
"""Between two looks at which rollouts have ended: what a cluster hears of its replicas."""

SEATS = 64
"""Requests that run together on a replica."""


class Policy(enum.StrEnum):
    SYNCHRONOUS = "synchronous"  # a step ends with its last rollout
    PARTIAL = "partial"  # it ends when most rollouts have; the others go on in the next
    STREAMING = "streaming"  # the next step's groups start as seats become free


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    groups_per_step: int
    samples: int  # per group
    prompt_len: int = 512
    seats: int = SEATS
    num_steps: int = 3
    part: float = 0.9  # of a step's rollouts that end it, where partial


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
    empty_seats: float  # share of seat time
    tail: float  # share of a step's time in which its last tenth of rollouts ends
    tokens_per_second: float  # a replica
    stale: float  # share of rollouts that began under older weights than those they ended under
    spread: float  # share of groups that ran on more than one replica


class Simulation:
    def __init__(
        self,
        num_replicas: int,
        workload: Workload,
        cost: Cost,
        lengths: GroupSampler,
        *,
        policy: Policy = Policy.SYNCHRONOUS,
        speculates: bool = True,
        seed: int = 0,
    ) -> None:
        self._workload = workload
        self._lengths = lengths
        self._policy = policy
        self._rng = np.random.default_rng(seed)
        names = [f"replica-{index}" for index in range(num_replicas)]
        self._router = Router(names)
        self._replicas: dict[str, SimulatedReplica] = {}
        for name in names:
            self._router.join(name, workload.seats)
            self._replicas[name] = SimulatedReplica(cost, workload.seats, speculates=speculates)
        self._events: list[tuple[float, str, int]] = []  # (when, replica, its version), a heap
        self._now = 0.0
        self._step = 0
        self._rollouts: list[_Rollout] = []
        self._homes: dict[int, set[str]] = {}
        self._num_groups = 0
        self._unfinished = 0

    def run(self) -> Outcome:
        """The outcome of all steps but the first, which begins with nothing under way."""
        num_steps = self._workload.num_steps
        marks = [self._mark()]
        tails = []
        for self._step in range(num_steps):
            began = self._now
            self._submit(self._num_new_groups())
            goal = self._goal()
            near = max(1, math.ceil(0.9 * goal)) if goal else 1
            almost = None
            num_ended = 0
            for ended in self._ends():
                num_ended += ended
                if almost is None and num_ended >= near:
                    almost = self._now
                if num_ended >= goal:
                    break
            tails.append((self._now - (almost or self._now)) / (self._now - began))
            if self._policy is Policy.PARTIAL:
                self._cut()
            marks.append(self._mark())
        return self._outcome(marks[1], marks[-1], tails[1:])

    def _num_new_groups(self) -> int:
        work = self._workload
        if self._policy is Policy.STREAMING and self._step == 0:
            return 2 * work.groups_per_step  # the first step's, and those to go on with
        if self._policy is Policy.PARTIAL:
            return max(1, round(work.groups_per_step - self._unfinished / work.samples))
        return work.groups_per_step

    def _goal(self) -> int:
        """Rollouts to end before the step does."""
        if self._policy is Policy.SYNCHRONOUS:
            return self._unfinished
        part = self._workload.part if self._policy is Policy.PARTIAL else 1
        whole = self._workload.groups_per_step * self._workload.samples
        return min(self._unfinished, round(whole * part))

    def _submit(self, num_groups: int) -> None:
        for _ in range(num_groups):
            group = self._num_groups
            self._num_groups += 1
            for length in self._lengths(self._rng, self._workload.samples).tolist():
                request = len(self._rollouts)
                self._rollouts.append(_Rollout(group, length, float(length)))
                self._router.add(request, _key(group))
                self._unfinished += 1

    def _ends(self) -> Iterator[int]:
        """How many rollouts ended, tick by tick; the clock moves on."""
        self._dispatch()
        while self._events:
            self._now = max(self._now, math.ceil(self._events[0][0] / TICK_SECONDS) * TICK_SECONDS)
            ended = 0
            while self._events and self._events[0][0] <= self._now:
                _, name, version = heapq.heappop(self._events)
                if self._replicas[name].version == version:
                    ended += self._finish(name)
            yield ended
            self._dispatch()

    def _finish(self, name: str) -> int:
        done = self._replicas[name].advance(self._now)
        for request in done:
            self._router.remove(request)
            self._rollouts[request].remaining = 0.0
            self._rollouts[request].ended_in = self._step
        self._unfinished -= len(done)
        self._plan(name)
        return len(done)

    def _dispatch(self) -> None:
        for name, requests in self._router.take().items():
            self._finish(name)
            for request in requests:
                rollout = self._rollouts[request]
                if rollout.begun_in < 0:
                    rollout.begun_in = self._step
                emitted = rollout.length - rollout.remaining
                context = self._workload.prompt_len + int(emitted)
                self._replicas[name].start(request, context, max(1, round(rollout.remaining)))
                self._homes.setdefault(rollout.group, set()).add(name)
            self._plan(name)

    def _plan(self, name: str) -> None:
        replica = self._replicas[name]
        if replica.num_running:
            heapq.heappush(self._events, (replica.next_end(), name, replica.version))

    def _cut(self) -> None:
        """Unfinished rollouts go on in the next step, before those that come new."""
        for name, replica in self._replicas.items():
            self._finish(name)
            for request, remaining in replica.stop_all().items():
                rollout = self._rollouts[request]
                rollout.remaining = remaining
                self._router.remove(request)
                self._router.add(request, _key(rollout.group))

    def _mark(self) -> NDArray[np.float64]:
        """Time, busy and seat seconds, tokens emitted."""
        for name in self._replicas:
            self._finish(name)
        busy = sum(replica.busy_seconds for replica in self._replicas.values())
        seats = sum(replica.seat_seconds for replica in self._replicas.values())
        emitted = sum(rollout.length for rollout in self._rollouts if rollout.ended_in >= 0)
        return np.array([self._now, busy, seats, emitted])

    def _outcome(
        self, first: NDArray[np.float64], last: NDArray[np.float64], tails: list[float]
    ) -> Outcome:
        work, count = self._workload, len(self._replicas)
        seconds, busy, seats, emitted = (last - first).tolist()
        ended = [rollout for rollout in self._rollouts if rollout.ended_in >= 1]
        stale = sum(rollout.begun_in < rollout.ended_in for rollout in ended)
        return Outcome(
            step_seconds=seconds / (work.num_steps - 1),
            idle=max(0.0, 1 - busy / (seconds * count)),
            empty_seats=max(0.0, 1 - seats / (seconds * count * work.seats)),
            tail=float(np.mean(tails)),
            tokens_per_second=emitted / seconds / count,
            stale=stale / len(ended),
            spread=sum(len(homes) > 1 for homes in self._homes.values()) / len(self._homes),
        )


def _key(group: int) -> int:
    """Spread over 64 bits, as prompts' keys are."""
    return (group + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
