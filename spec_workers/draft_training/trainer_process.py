"""The process that `CoTrainingProcess` starts (`python -m`) to train a draft beside an engine.

It reads commands from stdin and answers on stdout, one JSON object per line; tensors go through
shared memory. It never talks to the engine, and exits when stdin ends.

    <- {"ring", "draft", "dtype", "config", "training", ...}     "draft" is its folder
    <- {"lent": handle}      the target's embedding and head, now and whenever they change
    -> {"taken": true}
    <- {"round": "swapped" | "refused" | "broken" | "waits"}     the outcome of the last candidate
    -> {"judgement": {...}, "weights": handle or null, ...}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.nn.functional import embedding

from rollout.weights.manifest import named_dtype
from rollout.weights.named_tensors import NamedTensors
from rollout.weights.shared_memory import HandleReceiver, SharedMemorySender
from spec_workers.draft_training.building import load_draft
from spec_workers.draft_training.candidate import Candidate, CandidateVerdict
from spec_workers.draft_training.config import CoTrainingConfig, TrainingConfig
from spec_workers.draft_training.recent_rollouts import RecentRollouts
from spec_workers.draft_training.trainer import DraftTrainer
from spec_workers.features.feature_ring import FeatureReader

EMBEDDING, HEAD = "embedding", "head"
"""Names of the target's tensors: the embedding [V, E], and the head's rows of the draft's tokens
[D, E]."""

_IDLE_SECONDS = 0.1
"""Wait before answering a round with nothing to do, so that neither process spins."""


class SentTensors:
    """Sends sets of tensors through one shared-memory segment, one set at a time."""

    def __init__(self) -> None:
        self._sender: SharedMemorySender | None = None

    def handle(self, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Write a set and return its handle, valid until the next call."""
        if self._sender is None:
            room = sum(tensor.nbytes + 64 for _, tensor in tensors)
            self._sender = SharedMemorySender(room, num_segments=1)
        (handle,) = self._sender.handles(tensors)
        return handle

    def close(self) -> None:
        """Remove the segment."""
        if self._sender is not None:
            self._sender.close()


class TrainerProcess:
    """The training side of `CoTrainingProcess`."""

    def __init__(self, start: dict[str, Any], lent: dict[str, Any]) -> None:
        torch.set_num_threads(start["num_threads"])
        os.nice(start["niceness"])
        device = torch.device(start["device"])
        self._received = HandleReceiver()
        self._lent = {name: tensor.to(device, copy=True) for name, tensor in self._tensors(lent)}
        draft = load_draft(
            Path(start["draft"]), lambda ids: embedding(ids, self._lent[EMBEDDING])
        ).to(device)
        self._trainer = DraftTrainer(draft, self._lent[HEAD], TrainingConfig(**start["training"]))
        config = CoTrainingConfig(**start["config"])
        rollouts = RecentRollouts(FeatureReader.open(start["ring"]), config)
        dtype = named_dtype(start["dtype"], "dtype")
        self._candidate = Candidate(self._trainer, rollouts, config, dtype)
        self._sent = SentTensors()

    def answers(self, commands: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Execute the commands and yield one answer for each."""
        for command in commands:
            if "lent" in command:
                self._take(command["lent"])
                yield {"taken": True}
            else:
                self._note_outcome(command["round"])
                yield self._round()

    def _take(self, handle: dict[str, Any]) -> None:
        for name, tensor in self._tensors(handle):
            self._lent[name].copy_(tensor)
        self._trainer.take_head(self._lent[HEAD])

    def _note_outcome(self, outcome: str) -> None:
        if outcome == "swapped":
            self._candidate.swapped()
        elif outcome in ("refused", "broken"):
            self._candidate.refused(begin_anew=outcome == "broken")

    def _round(self) -> dict[str, Any]:
        rollouts = self._candidate.rollouts
        seen, missed, started = rollouts.num_taken, rollouts.num_missed, time.perf_counter()
        steps = self._candidate.train()
        judgement = self._candidate.judge()
        weights = None
        if judgement.verdict is CandidateVerdict.AS_GOOD:
            weights = self._sent.handle(self._trainer.named_tensors())
        elif not steps:
            time.sleep(_IDLE_SECONDS)
        return {
            "judgement": asdict(judgement),
            "weights": weights,
            "steps": steps,
            "sequences": rollouts.num_taken - seen,
            "missed": rollouts.num_missed - missed,
            "newest_version": rollouts.newest_version,
            "seconds": time.perf_counter() - started,
        }

    def _tensors(self, handle: dict[str, Any]) -> NamedTensors:
        return self._received.tensors([handle])


def main() -> None:
    """Run the process until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which closes stdin
    output = _private_stdout()
    commands = (json.loads(line) for line in sys.stdin)
    start, first = next(commands), next(commands)
    process = TrainerProcess(start, first["lent"])
    _write(output, {"taken": True})
    for answer in process.answers(commands):
        _write(output, answer)


def _private_stdout() -> TextIO:
    """The real stdout; anything else that prints goes to stderr from now on."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stdout


def _write(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
