"""Co-training: training a draft on the rollouts, between two steps of a training loop."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollout.engine.engine import RolloutEngine
from rollout.trainers.hook import WeightSync
from spec_workers.draft_training.candidate import Candidate, CandidateVerdict, Judgement
from spec_workers.draft_training.config import FOLLOWING, CoTrainingConfig, TrainingConfig
from spec_workers.draft_training.engine_draft import (
    DraftSwap,
    SwapResult,
    head_rows,
    recorder_of,
    trainable_draft,
)
from spec_workers.draft_training.recent_rollouts import RecentRollouts
from spec_workers.draft_training.trainer import DraftTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class CoTrainingRound:
    judgement: Judgement
    swap: SwapResult | None  # None: there was nothing to swap in
    unavailable_reason: str = ""  # why the engine did not take the draft
    steps: int = 0  # optimizer steps
    sequences: int = 0  # sequences read from the ring
    newest_version: int = 0  # newest version of the target's weights among all sequences read
    seconds: float = 0.0


class Tally:
    def __init__(self) -> None:
        names = (
            "rounds", "swaps", "worse", "broken", "postponed", "steps", "sequences", "seconds"
        )  # fmt: skip
        self._totals = dict.fromkeys(names, 0.0)
        self._judged: Judgement | None = None  # the last round's that judged
        self._trained_version = 0  # the newest version that the draft in use was trained on

    def add(self, one: CoTrainingRound) -> None:
        """Add one round. Candidates with NaN weights, or that the engine refused, are broken."""
        verdict = one.judgement.verdict
        is_swapped = one.swap is SwapResult.SWAPPED
        added = {
            "rounds": 1,
            "swaps": is_swapped,
            "worse": verdict is CandidateVerdict.WORSE,
            "broken": verdict is CandidateVerdict.NOT_FINITE or one.swap is SwapResult.REFUSED,
            "postponed": one.swap is SwapResult.POSTPONED,
        }
        added |= {name: getattr(one, name) for name in ("steps", "sequences", "seconds")}
        for name, value in added.items():
            self._totals[name] += value
        if is_swapped:
            self._trained_version = one.newest_version
        if verdict is not CandidateVerdict.NOT_JUDGED:
            self._judged = one.judgement

    def counters(self, weight_version: int) -> dict[str, float]:
        """Gauges for metrics. ``weight_version``: the target's current one."""
        staleness = weight_version - self._trained_version  # in the target's versions
        counters = self._totals | {"staleness": staleness}
        judged = self._judged
        if judged is not None and judged.accept_length is not None:
            assert judged.accept_length_in_use is not None
            counters["held_out_accept_length"] = judged.accept_length
            counters["held_out_accept_length_in_use"] = judged.accept_length_in_use
        return counters


class CoTrainer:
    """Trains an engine's draft in the engine's process, and swaps it in unless it is worse.

    Call it between two steps on the engine's thread (with an `EngineLoop`: ``loop.call``). Rollouts
    do not change: the target, its KV and its requests are left alone.

    Args:
        engine: must run an EAGLE-3 draft and record features (option ``feature_ring``).
        config: what it trains on, for how long, and when a new draft is swapped in.
        training: optimizer settings; default: `FOLLOWING`.

    Raises InvalidInputError for an engine whose draft cannot be trained, or that records nothing.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        config: CoTrainingConfig,
        *,
        training: TrainingConfig | None = None,
    ) -> None:
        self._engine = engine
        draft = trainable_draft(engine).to(engine.worker.model_device)
        self.swap = DraftSwap(engine)
        self._trainer = DraftTrainer(draft, head_rows(engine, draft), training or FOLLOWING)
        self._target_version = engine.weight_version
        rollouts = RecentRollouts(recorder_of(engine).ring, config)
        self.candidate = Candidate(self._trainer, rollouts, config, engine.worker.model_dtype)
        self.tally = Tally()

    def run(self) -> CoTrainingRound:
        """Do one round: read the ring, train, judge, and swap the draft in unless it is worse.

        Raises EngineStateError while the engine's weights are released.
        """
        started = time.perf_counter()
        self._follow_engine()
        rollouts = self.candidate.rollouts
        seen = rollouts.num_taken
        steps = self.candidate.train()
        judgement = self.candidate.judge()
        swap = self._conclude(judgement)
        done = CoTrainingRound(
            judgement=judgement,
            swap=swap,
            unavailable_reason=self.swap.unavailable_reason,
            steps=steps,
            sequences=rollouts.num_taken - seen,
            newest_version=rollouts.newest_version,
            seconds=time.perf_counter() - started,
        )
        self.tally.add(done)
        return done

    def skip(self) -> None:
        """Leave out the rollouts since the last round, for example after an evaluation."""
        self.candidate.rollouts.skip()

    def after_sync(self, sync: WeightSync) -> None:
        """Call `run`, as `RolloutHook` does after each sync."""
        self.run()

    def counters(self) -> dict[str, float]:
        return self.tally.counters(self._engine.weight_version)

    def _follow_engine(self) -> None:
        """Follow the engine: take the target's new head for labels, and a draft that others swapped
        in."""
        self._engine.worker.weights.require_resident()
        if self._engine.weight_version != self._target_version:
            self._trainer.take_head(head_rows(self._engine, self._trainer.draft))
            self._target_version = self._engine.weight_version
        if not self.swap.is_ours:
            self._trainer.load_named_tensors(self.swap.read().items())
            self.swap.acknowledge()
            self.candidate.swapped()

    def _conclude(self, judgement: Judgement) -> SwapResult | None:
        if judgement.verdict is CandidateVerdict.NOT_JUDGED:
            return None
        swap = None
        if judgement.verdict is CandidateVerdict.AS_GOOD:
            swap = self.swap.swap(self._trainer.named_tensors())
        if swap is SwapResult.SWAPPED:
            self.candidate.swapped()
        elif swap is not SwapResult.POSTPONED:
            self.candidate.refused(begin_anew=judgement.verdict is not CandidateVerdict.WORSE)
        return swap
