"""The log of a training run: a line of JSON per event, and what it says of a step's rollouts."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from rollout import Rollout


class Sampled(Protocol):
    """A rollout, or one turn of a conversation."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float]: ...


class Log:
    """Each event is written at once, to a new file and to the terminal."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}, default=str)
        print(line, file=self._file, flush=True)
        print(line, flush=True)


def describe(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """``nll``: nats per sampled token, at temperature 1 an estimate of the policy's entropy."""
    logprobs = [logprob for each in rollouts for logprob in each.logprobs]
    verify_steps = sum(each.stats.verify_steps for each in rollouts)
    return {
        "tokens": len(logprobs),
        "nll": -fmean(logprobs),
        "accept_length": 1 + sum(each.stats.accepted for each in rollouts) / verify_steps,
        "digest": digest(rollouts),
    }


def digest(rollouts: Sequence[Sampled]) -> str:
    """SHA-256 over every token and the bits of every logprob."""
    data = hashlib.sha256()
    for each in rollouts:
        data.update(struct.pack(f"<{len(each.token_ids)}i", *each.token_ids))
        data.update(struct.pack(f"<{len(each.logprobs)}d", *each.logprobs))
    return data.hexdigest()
