"""Forwards that are run to be timed, between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from rollout.engine.stopping import TokenStopCheck
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.runner.model_runner import ModelRunner
from rollout.types import Request, SamplingParams
from spec_workers.draft_tree import only_roots
from spec_workers.target.scorer import lone_run

CONTEXT = 128
"""Tokens before the rows of a trial forward."""

TrialForwards = dict[int, Callable[[], torch.Tensor]]
"""By their rows; each returns the logits of the last of those rows (see `logit_blocks`)."""


@contextmanager
def trial_forwards(
    memory: KVCacheManager, runner: ModelRunner, sizes: Sequence[int]
) -> Iterator[TrialForwards]:
    """Forwards of so many rows of one request, each to be run as often as wanted.

    ``sizes``: numbers of rows, ascending; those that KV slots or context do not suffice for are
    left out. The slots are borrowed while the context lasts.
    """
    room = min(memory.max_sequence_len, memory.run_room) - CONTEXT
    sizes = [rows for rows in sizes if rows <= room]
    tokens = [0] * (CONTEXT + max(sizes, default=0))
    memory.end_step()
    # A prompt of one token has no cached prefix, so all slots are the row's own.
    prompt = np.array(tokens[:1], dtype=np.int32)
    headroom = len(tokens) - 1
    admitted = memory.admit(prompt, headroom, final_len=len(tokens)) if sizes else None
    if admitted is None:
        yield {}
        return
    row, _ = admitted

    params = SamplingParams()
    never_stops = TokenStopCheck(params=params, eos_token_ids=(), decode=None)

    def forward(start: int, rows: int, *, commit: bool = False) -> torch.Tensor:
        request = Request(
            request_id=-1,
            tokens=tokens[: start + rows],
            prompt_len=start + rows,
            params=params,
            seed=0,
            group=0,
            stop_check=never_stops,
            row=row,
        )
        batch = lone_run(memory, request, start, rows)
        logits: list[torch.Tensor] = []
        runner.forward(batch, only_roots(1), logits.append, scored_from=start)
        if commit:
            memory.commit(batch.entries, [[]])
        memory.end_step(booked=commit)
        return logits[-1]

    try:
        if memory.extend(row, len(tokens)) < len(tokens):
            yield {}
            return
        forward(0, CONTEXT, commit=True)  # keys and values to attend to, a state to begin with
        yield {rows: partial(forward, CONTEXT, rows) for rows in sizes}
    finally:
        memory.release(row, [])
