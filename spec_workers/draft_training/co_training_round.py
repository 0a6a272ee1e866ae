"""What rounds of co-training came to, one by one and added up."""

from __future__ import annotations

from dataclasses import dataclass

from spec_workers.draft_training.candidate import Judgement, Verdict
from spec_workers.draft_training.draft_swap import SwapResult


@dataclass(frozen=True, kw_only=True, slots=True)
class CoTrainingRound:
    judgement: Judgement
    swap: SwapResult | None  # None: there was nothing to swap in
    unavailable_reason: str = ""  # the engine did not take it
    steps: int = 0  # of the optimizer
    sequences: int = 0  # that came through the ring
    missed: int = 0  # that were overwritten before they were taken
    newest_version: int = 0  # of the target's weights, among what came so far
    seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Tally:
    """Of all rounds."""

    rounds: int = 0
    swaps: int = 0
    worse: int = 0
    broken: int = 0  # NaN weights, or such as the engine refused
    postponed: int = 0
    steps: int = 0
    sequences: int = 0
    missed: int = 0
    seconds: float = 0.0
    last: CoTrainingRound | None = None  # that was judged
    trained_version: int = 0  # the newest policy that the draft in use has seen rollouts of

    def add(self, one: CoTrainingRound) -> None:
        self.rounds += 1
        self.steps += one.steps
        self.sequences += one.sequences
        self.missed += one.missed
        self.seconds += one.seconds
        verdict = one.judgement.verdict
        self.worse += verdict is Verdict.WORSE
        self.broken += verdict is Verdict.NOT_FINITE or one.swap is SwapResult.REFUSED
        self.postponed += one.swap is SwapResult.POSTPONED
        if one.swap is SwapResult.SWAPPED:
            self.swaps += 1
            self.trained_version = one.newest_version
        if verdict is not Verdict.NOT_JUDGED:
            self.last = one

    def counters(self, weight_version: int) -> dict[str, float]:
        """Gauges, for metrics. ``weight_version``: the target's now."""
        names = ("rounds", "swaps", "worse", "broken", "postponed", "steps", "sequences",
                 "missed", "seconds")  # fmt: skip
        counters: dict[str, float] = {name: getattr(self, name) for name in names}
        counters["staleness"] = weight_version - self.trained_version  # in the target's versions
        if self.last is not None and self.last.judgement.accept_length is not None:
            assert self.last.judgement.accept_length_in_use is not None
            counters["held_out_accept_length"] = self.last.judgement.accept_length
            counters["held_out_accept_length_in_use"] = self.last.judgement.accept_length_in_use
        return counters
