"""A training run on recorded rollouts: timed, checked on held-out ones, resumable.

Its folder holds the best draft so far, as the engine reads it; `training.pt`, the state of a run to
resume; and `training.jsonl`, the log.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollout.engine.durable_files import whole_file
from rollout.errors import InvalidInputError
from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.held_out import HeldOutResult
from spec_workers.draft_training.packed_rows import BatchOrder
from spec_workers.draft_training.target_features import TargetFeatures
from spec_workers.draft_training.trainer import DraftTrainer

LOG = "training.jsonl"
PLOT = "training.html"

Record = dict[str, Any]


class TrainingLog:
    """Writes records; each is flushed to the operating system when `write` returns."""

    def __init__(self, path: Path, resumed_steps: int = 0) -> None:
        """Open a log. Records of the first ``resumed_steps`` steps stay; a run that did not save
        logged the later ones."""
        former = read_training_log(path) if resumed_steps and path.exists() else []
        self._file = path.open("w", encoding="utf-8")
        for record in former:
            if record["step"] <= resumed_steps:
                self.write(record)

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_training_log(path: Path) -> list[Record]:
    """The complete records of a log. Raises InvalidInputError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise InvalidInputError("log", str(path), f"cannot be read: {error}") from None


CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def save_draft(draft: TrainableDraft, folder: Path, dtype: torch.dtype) -> None:
    """Write a draft. A reader of each file finds the old version or the new one."""
    tensors = {
        name: parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in draft.named_parameters()
    }
    tensors |= {"d2t": draft.vocabulary.offsets_D, "t2d": draft.vocabulary.contains_V}
    config = draft.config() | {"dtype": str(dtype).removeprefix("torch."), "torch_dtype": None}
    config = {name: value for name, value in config.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / CONFIG) as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")
    with whole_file(folder / WEIGHTS) as file:
        save_file(tensors, file.name, metadata={"format": "pt"})


STATE = "training.pt"
_CONSTANT_SHARE = 0.5
"""Share of the time at the full learning rate; then it falls linearly to zero."""


_FIRST_GUESS_SHARE = 0.4
"""Share of the time in which only the first guess is trained: later guesses build on its hidden
states, and each costs as much again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    seconds: float  # of training, with features, checks and the runs that it resumes
    batch_guesses: int = 2048  # of an optimizer step
    check_seconds: float = 120.0  # between two held-out checks
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    step: int
    seconds: float
    epoch: int
    loss: float
    cross_entropies: list[float]  # per unrolled step
    agreement: list[float]  # per unrolled step
    accept_length: float | None  # of the best draft so far


class TrainingRun:
    def __init__(
        self,
        trainer: DraftTrainer,
        train: TargetFeatures,
        held_out: TargetFeatures,
        folder: Path,
        options: RunOptions,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock``: returns seconds from any origin."""
        self._trainer = trainer
        self._train = train
        self._held_out = held_out
        self._folder = folder
        self._options = options
        self._clock = clock
        guesses, held_out_guesses = (
            [source.num_guesses(index) for index in range(len(source))]
            for source in (train, held_out)
        )
        self._order = BatchOrder(guesses, options.batch_guesses, options.seed)
        # Identifies the rollouts by their sizes: with others, a resumed run might be judged by
        # rollouts that it was trained on.
        self._rollouts = [len(guesses), sum(guesses), len(held_out_guesses), sum(held_out_guesses)]
        self._seconds = 0.0  # of this run and those it resumes
        self.best: HeldOutResult | None = None

    def resume(self) -> None:
        """Load the folder's state. Raises InvalidInputError if it is that of another run."""
        path = self._folder / STATE
        try:
            state = torch.load(path, weights_only=True)
            is_same = state["rollouts"] == self._rollouts
            if is_same:
                self._trainer.load_state_dict(state["trainer"])
        except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, ValueError) as error:
            raise InvalidInputError(
                "resume", str(path), f"is not the state of a run of this draft: {error}"
            ) from None
        if not is_same:
            raise InvalidInputError(
                "resume",
                str(path),
                "is of a run that trained on or held out other rollouts: give the same "
                "--rollouts, --held-out, --max-len and --seed, or another --output",
            )
        self._order.skip_to(state["epoch"], state["position"])
        self._seconds = state["seconds"]
        self.best = None if state["best"] is None else HeldOutResult(**state["best"])

    def train(self, is_stopped: Callable[[], bool], report: Callable[[RunProgress], None]) -> None:
        log = TrainingLog(self._folder / LOG, resumed_steps=self._trainer.steps)
        began = self._clock() - self._seconds
        try:
            if not self._trainer.steps:
                self._check(log)
                self._seconds = self._clock() - began
            checked = self._seconds
            while self._seconds < self._options.seconds:
                if is_stopped():
                    break
                self._step(log, report)
                self._seconds = self._clock() - began
                if self._seconds - checked >= self._options.check_seconds:
                    self._check(log)
                    self._save()
                    checked = self._seconds = self._clock() - began
            else:
                self._check(log)  # not after a stop, which should be quick
            self._save()
        finally:
            log.close()

    def _step(self, log: TrainingLog, report: Callable[[RunProgress], None]) -> None:
        done = self._seconds / self._options.seconds
        rate_scale = min(1.0, (1.0 - done) / (1.0 - _CONSTANT_SHARE))
        epoch = self._order.epoch
        batch = self._train.take(self._order.next())
        num_steps = 1 if done < _FIRST_GUESS_SHARE else None
        loss = self._trainer.step(batch, rate_scale, num_steps)
        progress = RunProgress(
            step=self._trainer.steps,
            seconds=self._seconds,
            epoch=epoch,
            loss=float(loss.total.detach()),
            cross_entropies=loss.cross_entropies,
            agreement=loss.agreement,
            accept_length=None if self.best is None else self.best.accept_length,
        )
        record = {"event": "step"} | asdict(progress)
        del record["accept_length"]  # checks have records of their own
        log.write(record)
        report(progress)

    def _check(self, log: TrainingLog) -> None:
        """Measure the draft, and save it if it is the best so far."""
        found = self._trainer.held_out_accept_length(
            self._held_out.take(range(len(self._held_out)))
        )
        log.write(
            {
                "event": "held out",
                "step": self._trainer.steps,
                "seconds": self._seconds,
                "accept_length": found.accept_length,
                "matched": found.matched,
            }
        )
        if self.best is None or found.accept_length > self.best.accept_length:
            self.best = found
            save_draft(self._trainer.draft, self._folder, torch.bfloat16)

    def _save(self) -> None:
        state: dict[str, Any] = {
            "trainer": self._trainer.state_dict(),
            "rollouts": self._rollouts,
            "epoch": self._order.epoch,
            "position": self._order.position,
            "seconds": self._seconds,
            "best": None if self.best is None else asdict(self.best),
        }
        with whole_file(self._folder / STATE) as file:
            torch.save(state, file)
