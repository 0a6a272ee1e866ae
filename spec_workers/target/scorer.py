"""Logprobs of given tokens, by forwards of a request that the scheduler does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from rollout.errors import OutOfMemoryError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.parallel import RankGroup
from rollout.runner.model_runner import ModelRunner
from rollout.sampling.rows import rows_of_continuation
from rollout.sampling.sampler import Sampler
from rollout.types import Batch, Request, Scheduled, TokenExtras
from spec_workers.draft_tree import only_roots


class Scorer:
    """Computes logprobs of given tokens, in chunks, beside the requests that run."""

    def __init__(
        self, memory: KVCacheManager, runner: ModelRunner, ranks: RankGroup, chunk_len: int
    ) -> None:
        """
        Args:
            ranks: those that have requests of their own and wait in each other's forwards.
            chunk_len: most tokens of a forward.
        """
        self._memory = memory
        self._runner = runner
        self._ranks = ranks
        self._chunk_len = chunk_len

    def score(
        self,
        request: Request,
        output_ids: list[int],
        observe: Callable[[torch.Tensor], object] | None = None,
    ) -> tuple[list[float], TokenExtras]:
        """Logprobs of the output's tokens after the request's.

        ``observe``: called with the logits [R, V] of their rows, block by block.

        Raises OutOfMemoryError when the KV slots cannot hold the sequence, or no state slots can be
        had.
        """
        logprobs: list[float] = []
        extras: list[TokenExtras] = []
        first = len(request.tokens) - 1  # samples the output's first token
        for batch in self._chunks(request, output_ids[:-1]):
            part = range(len(logprobs), max(0, batch.entries[0].end - first))
            rows = rows_of_continuation(request, output_ids, part)
            sampler = Sampler(rows, chosen=output_ids[part.start : part.stop])

            def take(logits_RV: torch.Tensor, sampler: Sampler = sampler) -> None:
                if observe is not None:
                    observe(logits_RV)
                sampler.take(logits_RV)

            self._runner.forward(batch, only_roots(1), take, scored_from=first)
            scored = sampler.read()
            logprobs += scored.logprobs
            extras += scored.extras
        self.score_idle()
        return logprobs, joined(extras)

    def score_idle(self) -> None:
        """Enter the forwards of ranks in lockstep that have more to score, with nothing."""
        while any(self._ranks.all_gather_int(0)):
            self._runner.forward(Batch(step=0, entries=[]), only_roots(0), lambda logits_RV: None)

    def _chunks(self, request: Request, continuation: list[int]) -> Iterator[Batch]:
        """Runs of the request with its continuation, each to be computed before the next."""
        memory = self._memory
        memory.end_step()
        tokens = request.tokens + continuation
        prompt = np.array(request.tokens, dtype=np.int32)
        admitted = memory.admit(prompt, headroom=len(continuation), final_len=len(tokens))
        if admitted is None:
            raise OutOfMemoryError(
                f"scoring {len(tokens)} tokens: {_what_is_short(memory, len(tokens))}"
            )
        row, start = admitted
        computed = start
        try:
            running = replace(request, tokens=tokens, row=row)
            while computed < len(tokens):
                self._ranks.all_gather_int(1)  # another one: see score_idle
                end = memory.extend(row, min(computed + self._chunk_len, len(tokens)))
                assert end > computed, "admission kept no slot for it"
                batch = lone_run(memory, running, computed, end - computed)
                yield batch
                computed = end
                _advance(memory, batch)
        finally:
            memory.release(row, tokens[:computed])


def lone_run(memory: KVCacheManager, request: Request, start: int, run_len: int) -> Batch:
    """One run and no drafts, of a request that the scheduler does not know. It has a row, and slots
    for its tokens."""
    run = memory.state_run(request.row, start, start + run_len, request.prompt_len)
    entry = Scheduled(
        request=request,
        start=start,
        run_len=run_len,
        draft_slots=np.empty(0, dtype=np.int32),
        states=memory.reserve_states([run], [0])[0],
    )
    return Batch(step=0, entries=[entry])


def _advance(memory: KVCacheManager, batch: Batch) -> None:
    """A lone run was run: its request goes on from there."""
    [entry] = batch.entries
    memory.commit([entry], [[]])
    memory.end_step(booked=True)
    if entry.states is not None and entry.states.checkpoints:
        shared = entry.request.tokens[: max(entry.states.checkpoints)]
        memory.share(entry.request.row, shared)
    memory.advance(entry.request.row, entry.end)


def _what_is_short(memory: KVCacheManager, num_tokens: int) -> str:
    states, windows = memory.states, memory.windows
    if states is not None and not states.fits_another:
        return (
            f"those that run need all {states.slots.num_slots} state slots; raise "
            "memory.state_slots or let requests finish"
        )
    if windows is not None and memory.obtainable >= num_tokens:
        return (
            f"only {windows.obtainable} window slots can be had, and those that run need some of "
            "them; raise memory.window_slots or let requests finish"
        )
    return (
        f"only {memory.obtainable} KV slots can be had; raise memory.kv_bytes or let requests "
        "finish"
    )


def joined(extras: list[TokenExtras]) -> TokenExtras:
    """The extras of consecutive tokens, joined."""
    found = TokenExtras()
    for extra in extras:
        found.extend(extra)
    return found
