"""An engine beside a trainer, whose weights follow the trainer's model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.trainers.hook import RolloutHook
from rollout.trainers.trl.seeds import TrlSampleSeeds
from rollout.types import FinishReason, MemoryTag, Rollout, SamplingParams

_log = logging.getLogger(__name__)


class ColocatedEngine:
    """One engine, or one cluster, for each process of one trainer.

    With ``sleep`` its weights and KV have memory only from a `sync` or the start of a batch to the
    batch's end. The weights' values are kept only where a `sync` is a collective, for `generate` is
    none; elsewhere they are taken anew from the trainer's model.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, seeds: TrlSampleSeeds, *, sleep: bool = False
    ) -> None:
        self.engine = engine
        self._model = model
        self._seeds = seeds
        self._sleep = sleep
        self._hook: RolloutHook | None = None
        self._values_kept = True  # of the weights, by an engine that sleeps
        self._fall_asleep()

    def sync(self) -> None:
        """Take the model's weights. A collective: every process of the trainer calls it."""
        if (
            self._hook is None
        ):  # not before: the trainer shards and wraps the model after it is made
            self._hook = RolloutHook(self.engine, self._model)
        if MemoryTag.WEIGHTS in self.engine.released_tags:
            self.engine.resume_memory([MemoryTag.WEIGHTS])
        self._hook.sync()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        samples_per_prompt: int,
        step: int,
        training: bool,
    ) -> list[Rollout]:
        """One rollout for each prompt, in their order; a prompt's samples follow one another.

        After the first `sync` a process may call it without the others.

        Raises InvalidInputError or OutOfMemoryError, showing the prompt, before anything is run.
        """
        seeds = self._seeds.next_batch(
            len(prompts), samples_per_prompt, step=step, training=training
        )
        if not self._values_kept and MemoryTag.WEIGHTS in self.engine.released_tags:
            self.sync()
        self.engine.resume_memory()  # the rest; nothing where nothing is released
        try:
            rollouts = self._run(prompts, params, seeds, samples_per_prompt)
        finally:
            self._fall_asleep()
        for rollout in rollouts:
            if rollout.finish_reason is FinishReason.ERROR:
                _log.warning(
                    "a rollout failed after %d tokens: %s", len(rollout.token_ids), rollout.error
                )
        return rollouts

    def _fall_asleep(self) -> None:
        if self._sleep:
            self._values_kept = self._hook is not None and bool(self._hook.source.ranks.groups)
            self.engine.release_memory(keep_weights=self._values_kept)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        samples_per_prompt: int,
    ) -> list[Rollout]:
        engine = self.engine
        if engine.has_unfinished:
            raise InvalidInputError(
                "engine", "busy", "requests of others are in it; give the trainer one of its own"
            )
        places: dict[int, int] = {}
        try:
            for place, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                index, sample = divmod(place, samples_per_prompt)
                request = engine.submit(
                    prompt, params, prompt_index=index, sample_index=sample, request_seed=seed
                )
                places[request.request_id] = place
            ended: dict[int, Rollout] = {}
            while len(ended) < len(places):
                ended |= {places[rollout.request_id]: rollout for rollout in engine.step()}
        except BaseException:
            for request_id in places:
                engine.abort(request_id)
            engine.take_ended()  # nobody wants them
            raise
        return [ended[place] for place in range(len(places))]
