"""A few forwards, timed before the first step, so that the first choices are no guesses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.ops import gpu
from rollout.parallel import RankGroup
from rollout.types import Batch, FinishReason, Request, SamplingParams
from spec_workers.budget.budget import DraftBudget
from spec_workers.budget.cost_curve import CostCurve
from spec_workers.budget.learned_budget import LearnedBudget
from spec_workers.draft_tree import only_roots
from spec_workers.scorer import lone_run
from spec_workers.target import TargetWorker

_CONTEXT = 128  # tokens before the rows that are timed
_SIZES = (1, 2, 4, 8, 12, 16, 32, 64)
_TURNS = 7  # that are timed


@dataclass(slots=True)
class _NeverStops:
    stop_token_ids: frozenset[int] = frozenset()

    def first_stop(
        self, request: Request, new_token_ids: Sequence[int]
    ) -> tuple[int, FinishReason | None]:
        return len(new_token_ids), None


def calibrate(target: TargetWorker, budget: DraftBudget, seconds: float) -> None:
    """Time forwards for a budget that learns what they cost and knows nothing of it yet.

    Not while the target's memory is given back, nor with ``seconds`` of 0, nor with ranks in
    lockstep, whose forwards cost what all of their rows do.
    """
    if not seconds or not isinstance(budget, LearnedBudget) or target.ranks.rows.size > 1:
        return
    if not budget.cost.is_known and not target.residency.unavailable_reason:
        time_forwards(target, budget.cost.curve, seconds)


def time_forwards(target: TargetWorker, curve: CostCurve, seconds: float) -> None:
    """Show the curve forwards of 1 to 64 rows: of each size the quickest until the time is up.

    The sizes take turns, so that a busy moment spoils none of them alone. Where forwards are
    captured that is done before the time begins.

    Between steps: borrows KV slots, and gives them back. Where they do not suffice, or where the
    context is too short, fewer sizes are timed.
    """
    clock = _Clock(target.ranks.tensor, seconds)
    memory = target.memory
    room = min(memory.max_sequence_len, memory.obtainable) - _CONTEXT
    sizes = [rows for rows in _SIZES if rows <= room]
    if not sizes:
        return
    tokens = [0] * (_CONTEXT + sizes[-1])
    memory.drop_steps()
    # Of one token nothing is cached, so that all of it is the row's own.
    admitted = memory.admit(np.array(tokens[:1], dtype=np.int32), headroom=len(tokens) - 1)
    if admitted is None:
        return
    row, _ = admitted
    try:
        if memory.extend(row, len(tokens)) < len(tokens):
            return
        before = _batch(target, tokens, row, 0, _CONTEXT)
        clock.forward_ms(target, before)  # keys and values to attend to, and a state to begin with
        memory.commit(before.entries, [[]])
        memory.end_step(booked=True)
        best: dict[int, float] = {}
        graphs = target.graphs
        warm_ups = 1 if graphs is None else 2  # its second forward is captured
        for turn in range(warm_ups + _TURNS):
            if graphs is not None and turn == warm_ups:
                clock = _Clock(target.ranks.tensor, seconds)
            for rows in sizes:
                if clock.is_up and (graphs is None or turn > warm_ups):
                    break
                milliseconds = clock.forward_ms(target, _batch(target, tokens, row, _CONTEXT, rows))
                memory.end_step()
                if turn >= warm_ups and (graphs is None or graphs.is_warm):
                    best[rows] = min(milliseconds, best.get(rows, milliseconds))
        for rows, milliseconds in best.items():
            curve.observe(rows, _CONTEXT + rows, milliseconds)
    finally:
        memory.release(row, [])


def _batch(target: TargetWorker, tokens: list[int], row: int, start: int, run_len: int) -> Batch:
    request = Request(
        request_id=-1,
        tokens=tokens[: start + run_len],
        prompt_len=start + run_len,
        params=SamplingParams(),
        seed=0,
        group=0,
        stop_check=_NeverStops(),
        row=row,
    )
    return lone_run(target.memory, request, start, run_len)


class _Clock:
    """Rank 0's clock: ranks that run one model time equally many forwards, and learn the same from
    them."""

    def __init__(self, group: RankGroup, seconds: float) -> None:
        self._group = group
        self._deadline = time.perf_counter() + seconds
        self.is_up = False  # after the last forward

    def forward_ms(self, target: TargetWorker, batch: Batch) -> float:
        started = time.perf_counter()
        scored_from = batch.entries[0].start
        with gpu.on(target.model.device):
            forwarded = target.runner.forward(batch, only_roots(1), scored_from=scored_from)
        logits_RV = forwarded.logits_RV
        if logits_RV.is_cuda:
            torch.cuda.synchronize(logits_RV.device)
        now = time.perf_counter()
        milliseconds, is_up = self._group.first([(now - started) * 1e3, now > self._deadline])
        self.is_up = bool(is_up)
        return milliseconds
