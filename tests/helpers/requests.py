"""Requests and trees made by hand, for tests below the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.engine.stopping import TokenStopCheck
from rollout.types import (
    Batch,
    DraftTrees,
    Request,
    SamplingParams,
    Scheduled,
    StopCheck,
)


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class NoStopCheck:
    """For requests of the scheduler alone, which does not decide where text ends."""

    def first_stop(self, request, new_token_ids):
        raise AssertionError("the scheduler asks where text ends")


def make_request(
    tokens: Sequence[int] = (1, 2, 3),
    *,
    prompt_len: int | None = None,
    seed: int = 0,
    eos: Sequence[int] = (),
    request_id: int = 0,
    group: int = 0,
    stop_check: StopCheck | None = None,
    **params: Any,
) -> Request:
    sampling = SamplingParams(**params)
    if stop_check is None:
        stop_check = TokenStopCheck(params=sampling, eos_token_ids=eos, decode=None)
    return Request(
        request_id=request_id,
        tokens=list(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        params=sampling,
        seed=seed,
        group=group,
        stop_check=stop_check,
    )


def decode_batch(requests: Sequence[Request]) -> Batch:
    """Every request runs its last token and is sampled from."""
    entries = [
        Scheduled(
            request=request,
            start=len(request.tokens) - 1,
            run_len=1,
            draft_slots=np.arange(63, dtype=np.int32),
        )
        for request in requests
    ]
    return Batch(step=0, entries=entries)


def make_trees(per_entry: Sequence[tuple[Sequence[int], Sequence[int]]]) -> DraftTrees:
    """Trees from (tokens, parents) of each entry, parents in tree numbering."""
    tokens, parents, depths, masks, offsets = [], [], [], [], [0]
    for entry_tokens, entry_parents in per_entry:
        own_depths, own_masks = [0], [1]
        for j, parent in enumerate(entry_parents, start=1):
            own_depths.append(own_depths[parent] + 1)
            own_masks.append(own_masks[parent] | 1 << j)
        tokens += list(entry_tokens)
        parents += list(entry_parents)
        depths += own_depths[1:]
        masks += own_masks[1:]
        offsets.append(len(tokens))
    return DraftTrees(
        offsets_B1=np.array(offsets, dtype=np.int64),
        tokens_N=np.array(tokens, dtype=np.int32),
        parents_N=np.array(parents, dtype=np.int32),
        depths_N=np.array(depths, dtype=np.int32),
        masks_N=np.array(masks, dtype=np.uint64),
        probs_N=np.ones(len(tokens), dtype=np.float32),
        sources_N=np.zeros(len(tokens), dtype=np.uint8),
    )
