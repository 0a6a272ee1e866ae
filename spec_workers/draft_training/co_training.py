"""A draft that follows the policy: trained between two steps of a loop, on what was rolled out."""

from __future__ import annotations

import time

import torch

from rollout.engine.engine import RolloutEngine
from rollout.trainers.hook import WeightSync
from spec_workers.draft_training.candidate import Candidate, Judgement, Verdict
from spec_workers.draft_training.co_training_config import FOLLOWING, CoTrainingConfig
from spec_workers.draft_training.co_training_round import CoTrainingRound, Tally
from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft_swap import DraftSwap, SwapResult
from spec_workers.draft_training.engine_draft import head_rows, recorder_of, trainable_draft
from spec_workers.draft_training.recent_rollouts import RecentRollouts
from spec_workers.draft_training.trainer import DraftTrainer


class CoTrainer:
    """Trains the draft of an engine in its own process, and swaps it in where it is no worse.

    Called between two steps, on the engine's thread (with an `EngineLoop`: ``loop.call``). It never
    changes what is rolled out: the target, its KV and its requests are left alone.

    Args:
        engine: runs an EAGLE-3 draft and records features: option ``feature_ring``.
        config: what it trains on and what a new draft must be.
        training: of the optimizer; default: `FOLLOWING`.

    Raises InvalidInputError for an engine whose draft cannot be trained or is not recorded.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        config: CoTrainingConfig | None = None,
        *,
        training: TrainingConfig | None = None,
    ) -> None:
        config = config or CoTrainingConfig()
        self._engine = engine
        draft = trainable_draft(engine).to(engine.worker.model_device)
        self.swap = DraftSwap(engine)
        self._trainer = DraftTrainer(draft, head_rows(engine, draft), training or FOLLOWING)
        self._target_version = engine.weight_version
        rollouts = RecentRollouts(recorder_of(engine).ring.reader(), config)
        self.candidate = Candidate(self._trainer, rollouts, config, engine.worker.model_dtype)
        self.tally = Tally()

    def run(self) -> CoTrainingRound:
        """One round: take what came, train, judge, and swap the draft in unless it is worse.

        Raises EngineStateError while the engine's weights are released.
        """
        started = time.perf_counter()
        self._follow_engine()
        rollouts = self.candidate.rollouts
        seen, missed = rollouts.num_taken, rollouts.num_missed
        steps = self.candidate.train()
        judgement = self.candidate.judge()
        swap = self._conclude(judgement)
        done = CoTrainingRound(
            judgement=judgement,
            swap=swap,
            unavailable_reason=self.swap.unavailable_reason,
            steps=steps,
            sequences=rollouts.num_taken - seen,
            missed=rollouts.num_missed - missed,
            newest_version=rollouts.newest_version,
            seconds=time.perf_counter() - started,
        )
        self.tally.add(done)
        return done

    def skip(self) -> None:
        """Do not train on what was rolled out since the last round: call it after an evaluation."""
        self.candidate.rollouts.skip()

    def after_sync(self, sync: WeightSync) -> None:
        """`run`, as `RolloutHook` calls it after each sync."""
        self.run()

    def counters(self) -> dict[str, float]:
        """Gauges, for metrics."""
        return self.tally.counters(self._engine.weight_version)

    def _follow_engine(self) -> None:
        """What the engine has: its head makes the labels, and its draft may be another's."""
        self._engine.worker.weights.require_resident()
        if self._engine.weight_version != self._target_version:
            self._trainer.take_head(head_rows(self._engine, self._trainer.draft))
            self._target_version = self._engine.weight_version
        if not self.swap.is_ours:
            self._trainer.load_named_tensors(self.swap.read().items())
            self.swap.acknowledge()
            self.candidate.swapped()

    def _conclude(self, judgement: Judgement) -> SwapResult | None:
        if judgement.verdict is Verdict.NOT_JUDGED:
            return None
        swap = None
        if judgement.verdict is Verdict.AS_GOOD:
            swap = self.swap.swap(self.candidate.named_tensors(torch.float32))
        if swap is SwapResult.SWAPPED:
            self.candidate.swapped()
        elif swap is not SwapResult.POSTPONED:
            self.candidate.refused(begin_anew=judgement.verdict is not Verdict.WORSE)
        return swap
