"""The one loop: propose, verify, accept, commit, observe."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from rollout.draft_corpus import DraftCorpus
from rollout.memory.cache import CacheMemory
from rollout.types import (
    Batch,
    DraftTrees,
    EntryResult,
    Request,
    StepResult,
    StepTimes,
    TokenExtras,
)
from rollout.weights.transaction import WeightState
from spec_workers.target import TargetWorker


class SpecWorker:
    """What every worker shares; a subclass says what it proposes and what it observes.

    No speculation is an empty draft: there is no other path through a step.
    """

    def __init__(self, target: TargetWorker) -> None:
        self.target = target

    @property
    def memory(self) -> CacheMemory:
        return self.target.memory

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def max_context_len(self) -> int:
        return self.target.max_context_len

    @property
    def is_whole(self) -> bool:
        return self.target.weights.state is WeightState.WHOLE

    @property
    def weight_version(self) -> int:
        return self.target.weight_version

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.target.eos_token_ids

    @property
    def model_dtype(self) -> torch.dtype:
        return self.target.model.dtype

    @property
    def max_draft_tokens(self) -> int:
        return 0

    @property
    def draft_corpus(self) -> DraftCorpus | None:
        return None

    def step(self, batch: Batch) -> StepResult:
        """Run one step. Emits for each sampling entry between one token and its longest path + 1.

        A request whose logits are no distribution ends alone, with FinishReason.ERROR.
        """
        clock = _Clock()
        trees = self.propose(batch)
        draft_ms = clock.lap()
        logits_RV = self.target.verify(batch, trees)
        forward_ms = clock.lap()
        results = self.target.accept(batch, trees, logits_RV)
        self.target.commit(batch, results)
        sample_ms = clock.lap()
        self.observe(batch, results)
        times = StepTimes(draft=draft_ms + clock.lap(), forward=forward_ms, sample=sample_ms)
        _count(batch, results, times)
        return StepResult(
            entries=results,
            weight_version=self.weight_version,
            num_query_tokens=batch.num_run_tokens + trees.num_nodes,
            expected_accepted=float(trees.probs_N.sum()),
            times=times,
        )

    def propose(self, batch: Batch) -> DraftTrees:
        raise TypeError(f"{type(self).__name__} does not say what it proposes")

    def observe(self, batch: Batch, results: list[EntryResult]) -> None:
        """Learn from what was committed. Called after commit, before the scheduler appends."""

    def release(self, request: Request) -> None:
        """The request ended."""

    def score(self, request: Request, output_ids: list[int]) -> tuple[list[float], TokenExtras]:
        return self.target.score(request, output_ids)

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], weight_version: int
    ) -> None:
        self.target.update_weights(named_tensors, weight_version)

    def counters(self) -> dict[str, float]:
        return self.target.counters()


def _count(batch: Batch, results: list[EntryResult], times: StepTimes) -> None:
    rows = [
        entry.run_len + result.num_drafted
        for entry, result in zip(batch.entries, results, strict=True)
    ]
    row_ms, entry_ms = times.forward / max(1, sum(rows)), times.draft / max(1, len(rows))
    for entry, result, num_rows in zip(batch.entries, results, rows, strict=True):
        stats = entry.request.stats
        stats.forward_ms += row_ms * num_rows
        stats.draft_ms += entry_ms
        if result.token_ids:
            stats.verify_steps += 1
            stats.drafted += result.num_drafted
            stats.accepted += len(result.path)


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Milliseconds since the last lap."""
        now = time.perf_counter()
        lap, self._last = (now - self._last) * 1e3, now
        return lap
