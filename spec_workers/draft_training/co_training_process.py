"""A draft that follows the policy, trained in a process of its own beside the engine."""

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
from types import TracebackType
from typing import Any, Self

import torch

from rollout.engine.engine import RolloutEngine
from rollout.errors import RolloutError
from rollout.trainers.hook import WeightSync
from rollout.weights.ipc import HandleReceiver
from rollout.weights.manifest import dtype_name
from rollout.weights.segment import remove_orphans
from spec_workers.draft_training import trainer_process
from spec_workers.draft_training.candidate import Judgement, Verdict
from spec_workers.draft_training.co_training import CoTrainingRound, Tally
from spec_workers.draft_training.co_training_config import FOLLOWING, CoTrainingConfig
from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft_swap import DraftSwap, SwapResult
from spec_workers.draft_training.engine_draft import (
    head_rows,
    recorder_of,
    target_embedding,
    trainable_draft,
)
from spec_workers.draft_training.trainer_process import EMBEDDING, HEAD, SentTensors
from spec_workers.draft_training.training_run import save_draft

log = logging.getLogger(__name__)


class CoTrainingProcess:
    """Trains an engine's draft in another process and swaps it in where it is no worse.

    That process reads the engine's feature ring and trains round after round; `poll`, called
    between two steps, never waits for it. When it dies the engine goes on with the draft it has.

    Args:
        engine, config, training: as of `CoTrainer`. The weights in use are those of the engine.
        device: it trains on.
        num_threads: of it.
        niceness: added to the process's, so that the engine comes first.

    Raises what `CoTrainer` does. A context manager; `close` ends the process.
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
        self._draft = trainable_draft(engine)  # its layout; the weights are read anew
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
        self.unavailable_reason = ""  # it trains no more; `restart` makes it
        self.tally = Tally()
        self._start()

    def poll(self) -> CoTrainingRound | None:
        """Swap in what it has, unless that is worse, and let it go on.

        The round that has ended since the last call, if any. When somebody else has given the
        engine another draft, training begins anew from that one. Nothing is done while the
        engine's weights are released, or when the process has died: ``unavailable_reason`` then
        says so.
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
                self._go_on()
        except (OSError, RolloutError) as error:
            self._give_up(str(error))
        return done

    def after_sync(self, sync: WeightSync) -> None:
        """`poll`, as `RolloutHook` calls it after each sync."""
        self.poll()

    def restart(self) -> None:
        """Begin anew from the draft the engine has now."""
        self._end()
        self._draft = trainable_draft(self._engine)
        self._swap.acknowledge()
        self.unavailable_reason = ""
        self._start()

    def counters(self) -> dict[str, float]:
        """Gauges, for metrics."""
        alive = {"is_training": float(not self.unavailable_reason)}
        return self.tally.counters(self._engine.weight_version) | alive

    def close(self) -> None:
        """End the process. The engine goes on with the draft it has."""
        self.unavailable_reason = self.unavailable_reason or "closed"
        self._end()
        self._sent.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        self._became = "waits"  # what became of its last candidate
        self._unread = b""
        self._awaited = 0  # answers
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._say(self._options | {"draft": self._folder.name})
        self._lend()

    def _go_on(self) -> None:
        if self._engine.weight_version != self._lent_version:
            self._lend()
        self._say({"round": self._became})
        self._became = "waits"
        self._awaited += 1

    def _lend(self) -> None:
        """The target's part in training: its embedding, and its head's rows."""
        head_DE = head_rows(self._engine, self._draft)
        self._lent_version = self._engine.weight_version
        embedding_VE = target_embedding(self._engine)
        self._say({"lent": self._sent.handle([(EMBEDDING, embedding_VE), (HEAD, head_DE)])})
        self._awaited += 1

    def _conclude(self, answer: dict[str, Any]) -> CoTrainingRound:
        judgement = Judgement(**answer["judgement"] | {
            "verdict": Verdict(answer["judgement"]["verdict"])
        })  # fmt: skip
        swap = None
        if judgement.verdict is Verdict.AS_GOOD:
            # Copies: a process that dies, or hurries on, cannot tear what is being swapped in.
            sent = self._received.tensors([answer["weights"]])
            swap = self._swap.swap([(name, tensor.clone()) for name, tensor in sent])
            self._received.release_removed()
        self._became = _BECAME[judgement.verdict if swap is None else swap]
        done = CoTrainingRound(
            judgement=judgement,
            swap=swap,
            unavailable_reason=self._swap.unavailable_reason,
            **{name: answer[name] for name in
               ("steps", "sequences", "missed", "newest_version", "seconds")},
        )  # fmt: skip
        self.tally.add(done)
        return done

    def _say(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _answers(self) -> list[dict[str, Any]]:
        """The answers that have come. Raises OSError when there will be no more."""
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
            "%s. The draft stays as it is; restart() begins anew from it", self.unavailable_reason
        )


def _answer(line: bytes) -> dict[str, Any] | None:
    """None for what only a library can have written: the process says nothing else."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and ("taken" in answer or "judgement" in answer):
        return answer
    log.warning("the process that trains the draft wrote: %s", line.decode(errors="replace"))
    return None


_BECAME = {
    SwapResult.SWAPPED: "swapped",
    SwapResult.POSTPONED: "waits",
    SwapResult.REFUSED: "broken",
    Verdict.WORSE: "refused",
    Verdict.NOT_FINITE: "broken",
    Verdict.NOT_JUDGED: "waits",
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
