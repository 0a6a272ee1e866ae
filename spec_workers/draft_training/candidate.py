"""The draft in training, compared with the draft in use that it may replace."""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from rollout.errors import InvalidInputError
from spec_workers.draft_training.config import CoTrainingConfig
from spec_workers.draft_training.recent_rollouts import RecentRollouts
from spec_workers.draft_training.sequences import TrainingSequence
from spec_workers.draft_training.trainer import DraftTrainer


class CandidateVerdict(enum.StrEnum):
    """The candidate compared with the draft in use."""

    AS_GOOD = "as_good"  # as good or better on the same held-out rollouts
    WORSE = "worse"
    NOT_FINITE = "not_finite"  # NaN or infinite weights: training restarts from those in use
    NOT_JUDGED = "not_judged"  # nothing was trained, or nothing is held out yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """A verdict and the measurements behind it; None where nothing was measured."""

    verdict: CandidateVerdict
    accept_length: float | None = None  # of the candidate
    accept_length_in_use: float | None = None  # of the draft in use


class Candidate:
    def __init__(
        self,
        trainer: DraftTrainer,
        rollouts: RecentRollouts,
        config: CoTrainingConfig,
        dtype: torch.dtype,
    ) -> None:
        """``trainer``: holds the weights in use. ``dtype``: the target's; features are cast to
        it."""
        if trainer.features != rollouts.features:
            raise InvalidInputError(
                "ring", rollouts.features, f"must record what the trainer reads: {trainer.features}"
            )
        self.trainer = trainer
        self.rollouts = rollouts
        self._config = config
        self._dtype = dtype
        self._random = random.Random(config.seed)
        self._in_use = deepcopy(trainer.state_dict())
        self._is_new = False  # trained since it was last swapped in or refused
        self._refusals = 0  # in a row
        self._rows = 0  # trained on in total

    def train(self) -> int:
        """Read the ring and train on recent rollouts for one round.

        Returns the number of optimizer steps. It is 0 while there is nothing to train on, or while
        the rollouts were trained on `max_replay` times.
        """
        started = time.perf_counter()
        self.rollouts.refresh()
        done = 0
        while self.rollouts.training and not self._is_over(done, time.perf_counter() - started):
            batch = self._batch()
            self.trainer.step(batch)
            self._rows += sum(len(each.features_NF) for each in batch)
            self._is_new = True
            done += 1
        return done

    def _is_over(self, steps: int, seconds: float) -> bool:
        config = self._config
        return (
            (config.steps is not None and steps >= config.steps)
            or (config.seconds is not None and seconds >= config.seconds)
            or self._rows >= config.max_replay * self.rollouts.num_rows
        )

    def judge(self) -> Judgement:
        """Compare with the draft in use on the newest held-out rollouts. Changes nothing."""
        held_out = self._cast(self.rollouts.held_out)
        if not self._is_new or not held_out:
            return Judgement(verdict=CandidateVerdict.NOT_JUDGED)
        if not all(torch.isfinite(tensor).all() for _, tensor in self.trainer.named_tensors()):
            return Judgement(verdict=CandidateVerdict.NOT_FINITE)
        new = self.trainer.held_out_accept_length(held_out).accept_length
        state = deepcopy(self.trainer.state_dict())
        self.trainer.load_state_dict(self._in_use)
        try:
            old = self.trainer.held_out_accept_length(held_out).accept_length
        finally:
            self.trainer.load_state_dict(state)
        is_as_good = new >= old + self._config.min_gain
        return Judgement(
            verdict=CandidateVerdict.AS_GOOD if is_as_good else CandidateVerdict.WORSE,
            accept_length=new,
            accept_length_in_use=old,
        )

    def swapped(self) -> None:
        self._in_use = deepcopy(self.trainer.state_dict())
        self._is_new, self._refusals = False, 0

    def refused(self, *, begin_anew: bool = False) -> None:
        """Record that the candidate was refused.

        With ``begin_anew``, or after `max_refusals` in a row, training restarts from the draft in
        use.
        """
        self._is_new = False
        self._refusals += 1
        if begin_anew or self._refusals >= self._config.max_refusals:
            # A copy: the optimizer changes the tensors that it is given.
            self.trainer.load_state_dict(deepcopy(self._in_use))
            self._refusals = 0

    def _batch(self) -> list[TrainingSequence]:
        """Random recent sequences, at least `batch_rows` rows if there are as many."""
        recent = self.rollouts.training
        batch, rows = [], 0
        for index in self._random.sample(range(len(recent)), len(recent)):
            batch.append(recent[index])
            rows += len(recent[index].features_NF)
            if rows >= self._config.batch_rows:
                break
        return self._cast(batch)

    def _cast(self, sequences: Iterable[TrainingSequence]) -> list[TrainingSequence]:
        return [replace(each, features_NF=each.features_NF.to(self._dtype)) for each in sequences]
