"""An engine beside a trainer, whose weights follow the trainer's model, and its samples' seeds."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from rollout.engine.engine import RolloutEngine
from rollout.engine.following_rank import FollowingRank
from rollout.engine.protocol import Engine
from rollout.errors import InvalidInputError
from rollout.parallel import RankGroup, SingleRank
from rollout.sampling.seeds import derive_seed
from rollout.trainers.hook import RolloutHook
from rollout.types import FinishReason, MemoryTag, Rollout, SamplingParams

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrlSampleSeeds:
    """Seeds of a run's samples.

    A seed derives from the run seed, train or eval, the global step, how many batches that step
    has had, and the sample's place in the batch of all processes. So it is the same for one process
    and for many, and for a run that was resumed; and no two samples of a step share one.
    """

    run_seed: int
    process_index: int
    _round: tuple[bool, int] = (True, -1)
    _batches: int = 0  # of this round
    _strides: dict[bool, int] = field(default_factory=dict)

    def next_batch(
        self, size: int, samples_per_prompt: int, *, step: int, training: bool
    ) -> list[int]:
        """Seeds for the next ``size`` samples of this process, each in [0, 2**64).

        The samples of one prompt follow one another, ``samples_per_prompt`` of them, and may go on
        in the next process: TRL's order.
        """
        if (training, step) != self._round:
            self._round, self._batches = (training, step), 0
        round_seed = derive_seed(self.run_seed, step, 2 * self._batches + (not training))
        self._batches += 1
        # Every process has as many samples in a whole batch. Later turns of a conversation are
        # fewer, not the same number everywhere, and must not meet another process's seeds.
        stride = max(self._strides.get(training, 0), size)
        self._strides[training] = stride
        first = self.process_index * stride
        return [
            derive_seed(round_seed, *divmod(first + index, samples_per_prompt))
            for index in range(size)
        ]


class ColocatedEngine:
    """One engine, or one cluster, for each process of one trainer.

    Where the processes' engines are ranks of one model, all generate the prompts of all, and each
    returns its own.

    With ``sleep`` its weights and KV have memory only from a `sync` or the start of a batch to the
    batch's end. The weights' values are kept only where a `sync` is a collective, for `generate` is
    none, or brings ``adapters_only``; elsewhere they are taken anew from the trainer's model.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        *,
        sleep: bool = False,
        adapters_only: bool = False,
    ) -> None:
        self.engine = engine
        self._model = model
        self._sleep = sleep
        self._adapters_only = adapters_only
        self._hook: RolloutHook | None = None
        self._values_kept = True  # of the weights, by an engine that sleeps
        self._ranks: RankGroup = SingleRank()
        if isinstance(engine, RolloutEngine | FollowingRank):
            self._ranks = engine.tensor_ranks
        self._fall_asleep()

    def sync(self) -> None:
        """Take the model's weights. A collective: every process of the trainer calls it."""
        # Not before: the trainer shards and wraps the model after this is made.
        if self._hook is None:
            self._hook = RolloutHook(self.engine, self._model, adapters_only=self._adapters_only)
        if MemoryTag.WEIGHTS in self.engine.released_tags:
            self.engine.resume_memory([MemoryTag.WEIGHTS])
        self._hook.sync()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int],
        *,
        samples_per_prompt: int,
    ) -> list[Rollout]:
        """One rollout for each prompt, by its own request seed, in their order; a prompt's samples
        follow one another.

        After the first `sync` a process may call it without those it shares no model with.

        Raises InvalidInputError or OutOfMemoryError, showing the prompt, before anything is run.
        """
        if not self._values_kept and MemoryTag.WEIGHTS in self.engine.released_tags:
            self.sync()
        self.engine.resume_memory()  # the rest; nothing where nothing is released
        all_prompts, all_seeds, own = self._gathered(prompts, seeds)
        try:
            run = partial(self._run, all_prompts, params, all_seeds, samples_per_prompt)
            if isinstance(self.engine, RolloutEngine | FollowingRank):
                rollouts = self.engine.led(run)[own]
            else:
                rollouts = run()
        finally:
            self._fall_asleep()
        for rollout in rollouts:
            if rollout.finish_reason is FinishReason.ERROR:
                _log.warning(
                    "a rollout failed after %d tokens: %s", len(rollout.token_ids), rollout.error
                )
        return rollouts

    def _gathered(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> tuple[list[list[int]], list[int], slice]:
        """The prompts and seeds of all ranks of the model, in rank order, and which are this
        rank's."""
        gathered = self._ranks.all_gather_text(
            json.dumps([[list(each) for each in prompts], list(seeds)])
        )
        parts = [json.loads(text) for text in gathered]
        first = sum(len(theirs) for theirs, _ in parts[: self._ranks.rank])
        return (
            [prompt for theirs, _ in parts for prompt in theirs],
            [seed for _, theirs in parts for seed in theirs],
            slice(first, first + len(prompts)),
        )

    def _fall_asleep(self) -> None:
        if self._sleep:
            is_collective = self._hook is not None and bool(self._hook.source.ranks.groups)
            self._values_kept = is_collective or self._adapters_only
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
                "engine", "busy", "requests of others are in it; let them end first"
            )
        index_of: dict[int, int] = {}
        try:
            for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                prompt_index, sample_index = divmod(index, samples_per_prompt)
                request = engine.submit(
                    prompt,
                    params,
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    request_seed=seed,
                )
                index_of[request.request_id] = index
            ended: dict[int, Rollout] = {}
            while len(ended) < len(index_of):
                ended |= {index_of[rollout.request_id]: rollout for rollout in engine.step()}
        except BaseException:
            for request_id in index_of:
                engine.abort(request_id)
            engine.take_ended()  # their rollouts are dropped
            raise
        return [ended[index] for index in range(len(index_of))]
