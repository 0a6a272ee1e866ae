"""Co-training in a separate process beside the engine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from rollout.engine.engine import RolloutEngine
from rollout.errors import RolloutError
from rollout.trainers.hook import WeightSync
from rollout.weights.manifest import dtype_name
from rollout.weights.segment import remove_orphans
from rollout.weights.shared_memory import HandleReceiver
from spec_workers.draft_training import trainer_process
from spec_workers.draft_training.candidate import CandidateVerdict, Judgement
from spec_workers.draft_training.co_training import CoTrainingRound, Tally
from spec_workers.draft_training.config import FOLLOWING, CoTrainingConfig, TrainingConfig
from spec_workers.draft_training.engine_draft import (
    DraftSwap,
    SwapResult,
    head_rows,
    recorder_of,
    target_embedding,
    trainable_draft,
)
from spec_workers.draft_training.trainer_process import EMBEDDING, HEAD, SentTensors
from spec_workers.draft_training.training_run import save_draft

log = logging.getLogger(__name__)


class CoTrainingProcess:
    """Trains an engine's draft in another process, and swaps it in unless it is worse.

    That process reads the engine's feature ring and trains round after round. `poll`, called
    between two steps, never waits for it. If it dies, the engine goes on with the draft it has.
    A context manager; `close` ends the process.

    Args:
        engine, config, training: as for `CoTrainer`.
        device: the process's torch device.
        num_threads: the process's CPU threads.
        niceness: added to the process's, so that the engine has priority.

    Raises what `CoTrainer` raises.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        config: CoTrainingConfig | None = None,
        *,
        training: TrainingConfig | None = None,
        device: str = "cpu",
        num_threads: int = 1,
        niceness: int = 10,
    ) -> None:
        self._engine = engine
        self._draft = trainable_draft(engine)  # first weights, and the layout for later ones
        self._swap = DraftSwap(engine)
        self._options = {
            "ring": recorder_of(engine).ring.name,
            "dtype": dtype_name(engine.worker.model_dtype),
            "config": asdict(config or CoTrainingConfig()),
            "training": asdict(training or FOLLOWING),
            "device": device,
            "num_threads": num_threads,
            "niceness": niceness,
        }
        self._sent = SentTensors()
        self._received = HandleReceiver()
        self.unavailable_reason = ""  # why it does not train any more; `restart` clears it
        self.tally = Tally()
        self._start()

    def poll(self) -> CoTrainingRound | None:
        """Swap in a finished draft unless it is worse, and start the next round.

        Returns the round that ended since the last call, if any. If somebody else changed the
        engine's draft, training restarts from that one. Does nothing while the engine's weights are
        released, or if the process has died; ``unavailable_reason`` then says so.
        """
        if self.unavailable_reason or not self._engine.worker.weights.is_resident:
            return None
        done = None
        try:
            if not self._swap.is_ours:
                self.restart()
                return None
            for answer in self._answers():
                self._awaited -= 1
                if "judgement" in answer:
                    done = self._conclude(answer)
            if not self._awaited:
                self._start_round()
        except (OSError, RolloutError) as error:
            self._give_up(str(error))
        return done

    def after_sync(self, sync: WeightSync) -> None:
        """Call `poll`, as `RolloutHook` does after each sync."""
        self.poll()

    def restart(self) -> None:
        """Start a new process from the engine's current draft."""
        self._end()
        self._draft = trainable_draft(self._engine)
        self._swap.acknowledge()
        self.unavailable_reason = ""
        self._start()

    def counters(self) -> dict[str, float]:
        """Gauges for metrics."""
        alive = {"is_training": float(not self.unavailable_reason)}
        return self.tally.counters(self._engine.weight_version) | alive

    def close(self) -> None:
        """End the process. The engine keeps its draft."""
        self.unavailable_reason = self.unavailable_reason or "closed"
        self._end()
        self._sent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        save_draft(self._draft, Path(self._folder.name), torch.float32)
        self._process = subprocess.Popen(
            [sys.executable, "-m", trainer_process.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._end = weakref.finalize(self, _end, self._process, self._folder)
        self._outcome = "waits"  # of the process's last candidate
        self._unread = b""
        self._awaited = 0  # answers still to come
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._send(self._options | {"draft": self._folder.name})
        self._lend()

    def _start_round(self) -> None:
        if self._engine.weight_version != self._lent_version:
            self._lend()
        self._send({"round": self._outcome})
        self._outcome = "waits"
        self._awaited += 1

    def _lend(self) -> None:
        """Send the target's embedding and its head's rows of the draft's tokens."""
        head_DE = head_rows(self._engine, self._draft)
        self._lent_version = self._engine.weight_version
        embedding_VE = target_embedding(self._engine)
        self._send({"lent": self._sent.handle([(EMBEDDING, embedding_VE), (HEAD, head_DE)])})
        self._awaited += 1

    def _conclude(self, answer: dict[str, Any]) -> CoTrainingRound:
        judgement = Judgement(**answer["judgement"] | {
            "verdict": CandidateVerdict(answer["judgement"]["verdict"])
        })  # fmt: skip
        swap = None
        if judgement.verdict is CandidateVerdict.AS_GOOD:
            # Copies: the process may die or overwrite its segment during the swap.
            sent = self._received.tensors([answer["weights"]])
            swap = self._swap.swap([(name, tensor.clone()) for name, tensor in sent])
            self._received.release_removed()
        self._outcome = _OUTCOMES[judgement.verdict if swap is None else swap]
        done = CoTrainingRound(
            judgement=judgement,
            swap=swap,
            unavailable_reason=self._swap.unavailable_reason,
            **{name: answer[name] for name in
               ("steps", "sequences", "missed", "newest_version", "seconds")},
        )  # fmt: skip
        self.tally.add(done)
        return done

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _answers(self) -> list[dict[str, Any]]:
        """The answers so far, without waiting. Raises OSError if the process has ended."""
        assert self._process.stdout is not None
        try:
            while part := os.read(self._process.stdout.fileno(), 1 << 16):
                self._unread += part
        except BlockingIOError:
            pass
        else:
            raise BrokenPipeError(f"it ended with exit status {self._process.wait()}")
        *lines, self._unread = self._unread.split(b"\n")
        return [answer for line in lines if (answer := _answer(line)) is not None]

    def _give_up(self, reason: str) -> None:
        self._end()
        self.unavailable_reason = f"the process that trains the draft is lost: {reason}"
        log.warning(
            "%s. The draft stays as it is; restart() trains on from it", self.unavailable_reason
        )


def _answer(line: bytes) -> dict[str, Any] | None:
    """The answer in a line, or None for a line that a library wrote."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and ("taken" in answer or "judgement" in answer):
        return answer
    log.warning("the process that trains the draft wrote: %s", line.decode(errors="replace"))
    return None


_OUTCOMES = {
    SwapResult.SWAPPED: "swapped",
    SwapResult.POSTPONED: "waits",
    SwapResult.REFUSED: "broken",
    CandidateVerdict.WORSE: "refused",
    CandidateVerdict.NOT_FINITE: "broken",
    CandidateVerdict.NOT_JUDGED: "waits",
}


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):
            stream.close()
    folder.cleanup()
    remove_orphans()
