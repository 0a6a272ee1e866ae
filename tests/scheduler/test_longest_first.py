"""Admitting the groups expected longest first: the steps it saves, and the requests it may
delay."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.scheduler import LengthForecast, Scheduler
from rollout.scheduler.step_limits import StepLimits
from rollout.scheduler.waiting import MAX_OVERTAKEN
from rollout.types import EntryResult, FinishReason, Request, StepResult
from tests.helpers.requests import NoStopCheck, make_request

SAMPLES = 8


class NothingLearned(LengthForecast):
    """Leaves admission in the order of arrival."""

    def observe(self, group: int, length: int) -> None:
        pass


class Epoch:
    """One step of training: all samples of all groups, queued at once, until the last has ended."""

    def __init__(self, lengths_GS: np.ndarray, max_running: int, lengths: LengthForecast) -> None:
        memory = KVCacheManager(20_000, max_running, 1000, prefix_cache=True)
        limits = StepLimits(max_running=max_running, max_step_tokens=64, chunk_len=32)
        self.scheduler = Scheduler(limits, memory, lambda: 0, lengths)
        self.lengths = {}
        self.overtaken = {}
        self.steps = 0
        for group, lengths_S in enumerate(lengths_GS.tolist()):
            for length in lengths_S:
                request = make_request(
                    [group] * 6, request_id=len(self.lengths), group=group, max_new_tokens=900,
                    stop_check=NoStopCheck(),
                )  # fmt: skip
                self.lengths[request] = length
                self.overtaken[request] = 0
                self.scheduler.add(request)

    def run(self) -> int:
        """Steps until all have ended."""
        scheduler = self.scheduler
        while scheduler.has_unfinished:
            before = scheduler.waiting
            batch = scheduler.schedule()
            still = set(scheduler.waiting)
            for place, request in enumerate(before):
                if request in still:
                    self.overtaken[request] += sum(r not in still for r in before[place + 1 :])
            results = [
                EntryResult(token_ids=[9], logprobs=[0.0], finish_reason=self.reason(entry.request))
                if entry.samples
                else EntryResult()
                for entry in batch.entries
            ]
            scheduler.commit(batch, StepResult(entries=results, weight_version=0))
            self.steps += 1
        return self.steps

    def reason(self, request: Request) -> FinishReason | None:
        return FinishReason.STOP if len(request.token_ids) + 1 == self.lengths[request] else None


def epochs(seed: int, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [num_groups, SAMPLES] of two epochs: each group has its mean, each sample noise."""
    rng = np.random.default_rng(seed)
    means = np.exp(rng.normal(3, 0.8, num_groups))
    noise = np.exp(rng.normal(0, 0.4, (2, num_groups, SAMPLES)))
    first, second = (means[:, None] * noise).astype(int).clip(1, 800)
    return first, second


@pytest.mark.parametrize(
    ("num_groups", "max_running"), [(4, 8), (8, 8), (8, 16), (16, 8), (16, 16)]
)
def test_a_step_of_training_ends_sooner(num_groups: int, max_running: int):
    arrival, longest_first = [], []
    for seed in range(6):
        before, now = epochs(seed, num_groups)
        lengths = LengthForecast()
        for group, lengths_S in enumerate(before.tolist()):
            for length in lengths_S:
                lengths.observe(group, length)
        arrival.append(Epoch(now, max_running, NothingLearned()).run())
        epoch = Epoch(now, max_running, lengths)
        longest_first.append(epoch.run())
        assert max(epoch.overtaken.values()) <= MAX_OVERTAKEN + max_running
        # List scheduling in any order stays below this (Graham 1966); a step prefills, 6 tokens.
        assert longest_first[-1] <= now.sum() / max_running + now.max() + 3 * num_groups
    assert sum(longest_first) < 0.985 * sum(arrival)
