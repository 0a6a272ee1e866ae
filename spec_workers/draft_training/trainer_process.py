"""The process that trains a draft beside an engine: `python -m`, started by `CoTrainingProcess`.

It is told what to do on stdin and answers on stdout, a JSON object a line; tensors go through
shared memory. It never talks to the engine and goes when stdin ends.

    <- {"ring", "draft", "dtype", "config", "training", ...}     "draft" is its folder
    <- {"lent": handle}      the target's embedding and head, now and whenever they change
    -> {"taken": true}
    <- {"round": "swapped" | "refused" | "broken" | "waits"}     what became of the last candidate
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

from rollout.weights.ipc import HandleReceiver
from rollout.weights.manifest import NamedTensors, named_dtype
from rollout.weights.shared_memory import SharedMemorySender
from spec_workers.draft_training.building import load_draft
from spec_workers.draft_training.candidate import Candidate, Verdict
from spec_workers.draft_training.co_training_config import CoTrainingConfig
from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.recent_rollouts import RecentRollouts
from spec_workers.draft_training.trainer import DraftTrainer
from spec_workers.features.feature_ring import FeatureReader

EMBEDDING, HEAD = "embedding", "head"
"""Names of what the target lends: the embedding [V, E], and the head's rows of the draft's tokens
[D, E]."""

_IDLE_SECONDS = 0.1
"""Before a round in which there was nothing to do is answered, so that two do not spin."""


class SentTensors:
    """Hands a few tensors over whole, through one segment, one set at a time."""

    def __init__(self) -> None:
        self._sender: SharedMemorySender | None = None

    def handle(self, tensors: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """Valid until the next call: make that when these were taken."""
        if self._sender is None:
            room = sum(tensor.nbytes + 64 for _, tensor in tensors)
            self._sender = SharedMemorySender(room, num_segments=1)
        (handle,) = self._sender.handles(tensors)
        return handle

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


class TrainerProcess:
    """The other end of `CoTrainingProcess`."""

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
        for command in commands:
            if "lent" in command:
                self._take(command["lent"])
                yield {"taken": True}
            else:
                self._learn(command["round"])
                yield self._round()

    def _take(self, handle: dict[str, Any]) -> None:
        for name, tensor in self._tensors(handle):
            self._lent[name].copy_(tensor)
        self._trainer.take_head(self._lent[HEAD])

    def _learn(self, became: str) -> None:
        if became == "swapped":
            self._candidate.swapped()
        elif became in ("refused", "broken"):
            self._candidate.refused(begin_anew=became == "broken")

    def _round(self) -> dict[str, Any]:
        rollouts = self._candidate.rollouts
        seen, missed, started = rollouts.num_taken, rollouts.num_missed, time.perf_counter()
        steps = self._candidate.train()
        judgement = self._candidate.judge()
        weights = None
        if judgement.verdict is Verdict.AS_GOOD:
            weights = self._sent.handle(self._candidate.named_tensors(torch.float32))
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends stdin
    answers_to = _private_stdout()
    commands = (json.loads(line) for line in sys.stdin)
    start, first = next(commands), next(commands)
    process = TrainerProcess(start, first["lent"])
    _say(answers_to, {"taken": True})
    for answer in process.answers(commands):
        _say(answers_to, answer)


def _private_stdout() -> TextIO:
    """Whatever else prints, prints to stderr."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def _say(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
