"""Requests that stay for as long as they are looked at, saying what was recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from traces import Trace

_PER_PROMPT = 8


def seats(trace: Trace, count: int, length: int) -> Trace:
    """``count`` responses of at least ``length`` tokens, eight to a prompt.

    Each is the recorded responses of its prompt end to end, from another one on.
    """
    used = [
        prompt
        for prompt in range(len(trace.prompts))
        if any(len(trace.responses[r]) for r in np.flatnonzero(trace.prompt_of_R == prompt))
    ]
    prompt_of_R = np.array([used[seat // _PER_PROMPT % len(used)] for seat in range(count)])
    responses = []
    for seat, prompt in enumerate(prompt_of_R.tolist()):
        own = [trace.responses[r] for r in np.flatnonzero(trace.prompt_of_R == prompt)]
        at, parts, total = seat, [], 0
        while total < length:
            parts.append(own[at % len(own)])
            total += len(parts[-1])
            at += 1
        responses.append(np.concatenate(parts))
    return replace(
        trace,
        responses=responses,
        prompt_of_R=prompt_of_R,
        epoch_of_R=np.zeros(count, dtype=np.int64),
        temperature_of_R=np.full(count, np.nan),
        steps=[list(range(count))],
    )
