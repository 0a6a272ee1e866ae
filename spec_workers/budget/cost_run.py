"""Times a few forwards before the first step, so that the first choices are no guesses."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rollout.ops import gpu
from spec_workers.budget.budget import DraftBudget
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.learned_budget import LearnedBudget
from spec_workers.target import TargetWorker
from spec_workers.target.trial_forwards import trial_forwards

_SIZES = (1, 2, 4, 8, 12, 16, 32, 64)
_TURNS = 7  # that are timed


def calibrate(target: TargetWorker, budget: DraftBudget, seconds: float) -> None:
    """Time forwards for a budget that learns what they cost and knows nothing of it yet.

    Not while the target's memory is given back, nor with ``seconds`` of 0, nor with ranks in
    lockstep, whose forwards cost what all of their rows do.
    """
    if not seconds or not isinstance(budget, LearnedBudget) or target.ranks.rows.size > 1:
        return
    if not budget.costs.is_known and not target.memory_saver.unavailable_reason:
        time_forwards(target, budget.costs.plain, seconds)


def time_forwards(target: TargetWorker, curve: CostCurve, seconds: float) -> None:
    """Let the curve observe forwards of 1 to 64 rows: the fastest of each size within the time.

    The sizes take turns, so that a busy moment spoils none of them alone. Where forwards are
    captured that is done before the time begins.

    Between steps: borrows KV slots, and gives them back. Where they do not suffice, or where the
    context is too short, fewer sizes are timed.
    """
    graphs = target.graphs
    warm_ups = 1
    best: dict[int, float] = {}
    padded = {rows: max(rows, target.minimum_rows) for rows in _SIZES}
    with (
        gpu.on(target.model.device),
        trial_forwards(target.memory, target.runner, sorted(set(padded.values()))) as forwards,
    ):
        clock = _Clock(seconds)
        for turn in range(warm_ups + _TURNS):
            if graphs is not None and turn == warm_ups:
                clock = _Clock(seconds)
            for rows, forward in forwards.items():
                if clock.is_up and (graphs is None or turn > warm_ups):
                    break
                milliseconds = clock.milliseconds(forward)
                if turn >= warm_ups and (graphs is None or graphs.is_warm):
                    best[rows] = min(milliseconds, best.get(rows, milliseconds))
    for rows in _SIZES:
        if padded[rows] in best:
            curve.observe(rows, best[padded[rows]])


class _Clock:
    def __init__(self, seconds: float) -> None:
        self._deadline = time.perf_counter() + seconds
        self.is_up = False  # after the last forward

    def milliseconds(self, forward: Callable[[], torch.Tensor]) -> float:
        started = time.perf_counter()
        logits_RV = forward()
        if logits_RV.is_cuda:
            torch.cuda.synchronize(logits_RV.device)
        now = time.perf_counter()
        self.is_up = now > self._deadline
        return (now - started) * 1e3
