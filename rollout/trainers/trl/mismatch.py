"""A callback for TRL's trainers that compares the policy with the engine now and then."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from rollout.engine.engine import RolloutEngine
from rollout.trainers.mismatch.periodic import PeriodicProbe
from rollout.types import Prompt, SamplingParams


class MismatchProbe(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """``trainer.add_callback(MismatchProbe(trainer.vllm_generation.engine))``, or among a trainer's
    ``callbacks``: every ``every`` optimizer steps one rollout of the engine is compared, in at most
    2 % of the time. ``probe.last`` is the result; its figures are in the trainer's log.

    Only steps that follow a weight sync count: before the next one trainer and engine differ.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        every: int = 20,
        *,
        prompt: Prompt | None = None,
        **options: Any,
    ) -> None:
        """``prompt``: what rollouts continue; default: an end token. ``options``: of
        `PeriodicProbe`, whose errors are raised."""
        self.probe = PeriodicProbe(engine, every, **options)
        self._prompt = list(engine.eos_token_ids[:1] or (0,)) if prompt is None else prompt
        self._version = -1

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Compare, if it is time."""
        engine = self.probe.engine
        if engine.weight_version == self._version or not engine.can_run:
            return
        self._version = engine.weight_version
        if self.probe.is_due():
            params = SamplingParams(max_new_tokens=64, ignore_eos=True, seed=state.global_step)
            self.probe.compare(given["model"], engine.generate([self._prompt], params))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **given: Any
    ) -> None:
        """Add the latest figures to a line of the log."""
        if (found := self.probe.last) is not None:
            for line in (logs, *state.log_history[-1:]):
                line["specrollout/mismatch"] = found.max_difference
                line["specrollout/mismatch_kl"] = found.divergence.mean
