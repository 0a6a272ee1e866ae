"""Schedules the next step: continuous batching with chunked prefill. Integers and lists only.

A request waits, runs and finishes. Memory pressure or a weight update may send it back to the
waiting queue. Every decision depends only on the calls made so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.layer_slots import StateRun
from rollout.scheduler.length_forecast import LengthForecast
from rollout.scheduler.step_limits import StepLimits, check_length
from rollout.scheduler.waiting import QueuedRequest, ReplacementRate, WaitingQueue
from rollout.types import (
    MAX_TREE_NODES,
    NO_EXTRAS,
    Batch,
    EntryResult,
    FinishReason,
    Remaining,
    Request,
    Scheduled,
    ScheduledStates,
    StepResult,
    Tail,
)

DECODE_HEADROOM = 16
"""Slots left free per running request at admission, so that it is not preempted at once."""

DRAFT_SHARE = 4
"""Draft nodes take at most one slot in so many, however many slots could be evicted."""

_AT_ITS_LIMIT = 2
"""A rollout cut at its limit counts as half-way: its full length is unknown, and twice its length
is the median where every scale is equally likely (Gott 1993)."""


_UNLIMITED = 2**31
"""More tokens than any request emits."""


Runs = dict[Request, int]
"""Tokens that each request runs in a step."""


class Scheduler:
    """The waiting queue, the running requests, and the rules that move requests between them.

    Args:
        max_draft_tokens: returns, in each step, how many draft nodes one request may use without
            the root: the worker's property of that name.
        lengths: records how long rollouts became and ranks admissions; may hold earlier lengths.
    """

    def __init__(
        self,
        limits: StepLimits,
        memory: KVCacheManager,
        max_draft_tokens: Callable[[], int],
        lengths: LengthForecast,
    ) -> None:
        assert memory.req_to_token.max_rows >= limits.max_running
        self.limits = limits
        self.memory = memory
        self.lengths = lengths
        self.max_draft_tokens = max_draft_tokens
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # in the order of admission
        self._prompts: dict[int, bytes] = {}  # of unfinished requests, by request_id
        self._replacements = ReplacementRate()
        self._step = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Running requests in the order of admission, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting requests in queue order, from which admission may depart."""
        return tuple(queued.request for queued in self._waiting)

    def check_fits(self, request: Request, field: str = "prompt") -> None:
        """Raise, as `check_length` does, unless the request can run alone."""
        check_length(
            len(request.tokens),
            self.memory.req_to_token.max_context_len,
            self.memory.max_sequence_len,
            field,
        )

    def add(self, request: Request) -> None:
        """Queue a new request that passed check_fits()."""
        self._replacements.submit(is_idle=not self.has_unfinished)
        self._prompts[request.request_id] = _int32(request.tokens[: request.prompt_len]).tobytes()
        self._waiting.push(self._queued_request(request, first=True))

    def schedule(self) -> Batch:
        """The next step: decodes, then prefill chunks, then admissions, then draft slots.

        The batch is empty if nothing is unfinished. A batch before it that was not committed counts
        as failed, and its runs are scheduled again.
        """
        self.memory.end_step()
        runs: Runs = {}  # in batch order
        decodes = [each for each in self._running if len(each.tokens) == each.computed_len + 1]
        prefills = []
        if len(decodes) < len(self._running):
            prefills = [request for request in self._running if request.extend_len > 1]
        rows = [request.row for request in decodes]
        if self.memory.extend_by_one(rows, [request.computed_len for request in decodes]):
            runs = dict.fromkeys(decodes, 1)
        else:
            prefills = decodes + prefills
        for request in prefills:
            self._run(request, runs)
        self._admit(runs)
        assert runs or not self.has_unfinished, "unfinished requests, and none can run"
        self._step += 1
        tail = None
        if not self._waiting:
            tail = Tail(replaced=self._replacements.value, remaining=self._remaining)
        return Batch(step=self._step, entries=self._with_drafts(runs), tail=tail)

    def commit(self, batch: Batch, result: StepResult) -> list[Request]:
        """Book a step's results: append tokens, advance KV lengths. Returns the finished requests.

        The worker has already committed the accepted drafts' slots (KVCacheManager.commit).
        """
        self.memory.end_step(booked=True)
        finished = []
        for entry, output in zip(batch.entries, result.entries, strict=True):
            request = entry.request
            self._append(request, output, result.weight_version)
            # A request that stopped inside its accepted path has KV beyond its last token.
            reached = entry.start + entry.run_len + len(output.path)
            request.computed_len = min(reached, len(request.tokens))
            if request.finish_reason is not None:
                self._observe_length(request)
                self._finish(request)
                if not self._waiting:
                    self._replacements.end()
                finished.append(request)
                continue
            if shared_len := self._newly_shared(entry):
                self.memory.share(request.row, request.tokens[:shared_len])
            self.memory.advance(request.row, request.computed_len)
        if finished:
            self._running = [r for r in self._running if r.finish_reason is None]
        return finished

    def has(self, request_id: int) -> bool:
        """Whether the request is waiting or running."""
        return request_id in self._prompts

    def abort(self, request_id: int) -> Request | None:
        """End a request now. None if it is unknown or has finished."""
        self.memory.end_step()
        request = self._waiting.remove(request_id)
        if request is None:
            request = next((r for r in self._running if r.request_id == request_id), None)
            if request is None:
                return None
            self._running.remove(request)
        request.finish_reason = FinishReason.ABORT
        self._finish(request)
        return request

    def abort_all(self) -> list[Request]:
        """End every request now. Returns them, running ones first."""
        self.memory.end_step()
        requests = self._running + self._waiting.clear()
        self._running = []
        for request in requests:
            request.finish_reason = FinishReason.ABORT
            self._finish(request)
        return requests

    def retract_all(self) -> None:
        """Return every running request to the waiting queue and drop its KV: the weights will
        change.

        Tokens and logprobs stay; the KV is computed again under the new weights. The prefix cache
        is not touched: KVCacheManager.reset() drops it.
        """
        self.memory.end_step()
        for request in reversed(self._running):
            self._retract(request, cache_kv=False)
        self._running = []

    def _run(self, request: Request, runs: Runs) -> None:
        """Schedule the request's next tokens, preempting younger requests if slots are short."""
        if request.row < 0:
            return  # preempted in this step by an older one
        budget = self.limits.max_step_tokens - sum(runs.values())
        run_len = min(request.extend_len, self.limits.chunk_len, budget)
        while run_len > 0:
            reached = self.memory.extend(request.row, request.computed_len + run_len)
            if reached > request.computed_len:
                runs[request] = reached - request.computed_len
                return
            # Never the only running request: max_sequence_len tokens fit once others are gone.
            victim = self._running.pop()
            runs.pop(victim, None)
            self._retract(victim, cache_kv=True)
            victim.stats.preemptions += 1
            if victim is request:
                return

    def _admit(self, runs: Runs) -> None:
        """Admit while max_running, the step's tokens and memory for the whole prompt allow it.

        Admission stops at the first request that does not fit: smaller ones would starve it.
        """
        limits, memory = self.limits, self.memory
        num_free = limits.max_running - len(self._running)
        budget = limits.max_step_tokens - sum(runs.values())
        if not (self._waiting and num_free and budget):
            return
        prefilling = {
            self._prompts[request.request_id]
            for request in self._running
            if request.computed_len < request.prompt_len
        }
        # Without observed lengths the forecast is the request's limit, which must not rank it.
        expected = _nothing_expected if self.lengths.is_empty else self._expected_remaining
        for queued in self._waiting.candidates(memory, prefilling, expected)[:num_free]:
            request = queued.request
            unrun = sum(r.extend_len - runs.get(r, 0) for r in self._running)
            headroom = unrun + DECODE_HEADROOM * len(self._running)
            admitted = memory.admit(queued.tokens, headroom) if budget else None
            if admitted is None:
                return
            request.row, request.computed_len = admitted
            if queued.first:
                request.stats.cached_tokens = request.computed_len
            self._waiting.take(queued)
            self._running.append(request)
            self._run(request, runs)
            budget -= runs[request]

    def _with_drafts(self, runs: Runs) -> list[Scheduled]:
        """Add draft slots to the runs that are sampled from, evenly if they are scarce.

        One slot is left for each other running request, for its next token.
        """
        wanted = self._draft_rooms(runs)
        if any(wanted):
            share = self.memory.node_slots // DRAFT_SHARE
            others = len(self._running) - len(runs)
            room = max(0, min(self.memory.node_room(len(runs)) - others, share))
            if sum(wanted) > room:
                share = room // sum(count > 0 for count in wanted)
                wanted = [min(count, share) for count in wanted]
        drafts = self.memory.reserve_drafts(wanted)
        states: Sequence[ScheduledStates | None] = [None] * len(runs)
        if self.memory.states is not None:
            state_runs = [self._state_run(request, run_len) for request, run_len in runs.items()]
            states = self.memory.reserve_states(state_runs, wanted)
        return [
            Scheduled(
                request=request,
                start=request.computed_len,
                run_len=run_len,
                draft_slots=slots,
                states=own_states,
            )
            for (request, run_len), slots, own_states in zip(
                runs.items(), drafts, states, strict=True
            )
        ]

    def _state_run(self, request: Request, run_len: int) -> StateRun:
        start = request.computed_len
        return self.memory.state_run(request.row, start, start + run_len, request.prompt_len)

    def _draft_rooms(self, runs: Runs) -> list[int]:
        """Draft nodes that each run can use: at most the tokens it may still emit, minus one.

        The one is the target's own. A prefill chunk, which is not sampled from, can use none.
        """
        most = min(self.max_draft_tokens(), MAX_TREE_NODES - 1)
        if not most:
            return [0] * len(runs)
        longest = self.memory.max_sequence_len
        rooms = []
        for request, run_len in runs.items():
            length = len(request.tokens)
            samples = request.computed_len + run_len == length
            room = min(request.max_len, longest) - length - 1 if samples else 0
            rooms.append(most if room >= most else max(0, room))
        return rooms

    def _expected_remaining(self, request: Request) -> float:
        """Tokens the request is expected to emit yet."""
        room = self._room(request)
        return self.lengths.remaining(request.group, request.generated_len, room)

    def _remaining(self, request: Request) -> Remaining:
        expected = self.lengths.remaining(request.group, request.generated_len, _UNLIMITED)
        return Remaining(expected, self._room(request))

    def _room(self, request: Request) -> int:
        """Tokens the request may still emit, at least 1."""
        return max(1, min(request.max_len, self.memory.max_sequence_len) - len(request.tokens))

    def _append(self, request: Request, output: EntryResult, weight_version: int) -> None:
        request.tokens += output.token_ids
        request.logprobs += output.logprobs
        request.weight_versions += [weight_version] * len(output.token_ids)
        if output.extras is not NO_EXTRAS:
            request.extras.extend(output.extras)
        if output.finish_reason is not None:
            request.finish_reason, request.error = output.finish_reason, output.error
        elif len(request.tokens) >= self.memory.max_sequence_len:
            request.finish_reason = FinishReason.LENGTH

    def _newly_shared(self, entry: Scheduled) -> int:
        """Length that others may share from now on: the prompt as far as it is computed, or a
        checkpoint of its state. 0 if nothing is new, or nobody waits for an unfinished prompt."""
        request = entry.request
        shared = 0
        if entry.start < request.prompt_len <= request.computed_len:
            shared = request.prompt_len
        elif entry.start < request.prompt_len and self._waiting and self.memory.shares_unfinished:
            shared = request.computed_len
        if entry.states is None:
            return shared
        return max(shared, *entry.states.checkpoints, 0)

    def _observe_length(self, request: Request) -> None:
        if request.finish_reason is FinishReason.STOP:
            self.lengths.observe(request.group, request.generated_len)
        elif request.finish_reason is FinishReason.LENGTH:
            self.lengths.observe(request.group, _AT_ITS_LIMIT * request.generated_len)

    def _finish(self, request: Request) -> None:
        del self._prompts[request.request_id]
        self._note_routes(request)
        if request.row >= 0:  # KV and states behind broken logits must not be reused
            self._release(request, cache_kv=request.finish_reason is not FinishReason.ERROR)

    def _note_routes(self, request: Request) -> None:
        """Read the routes of computed tokens before the slots are freed.

        Routes from before a preemption stay until as many tokens are computed again.
        """
        if request.params.routed_experts:
            run = 0 if request.row < 0 else min(request.computed_len, len(request.tokens) - 1)
            known = request.routed_experts
            if known is None or run >= len(known):
                request.routed_experts = self.memory.routed_experts(request.row, run)

    def _retract(self, request: Request, cache_kv: bool) -> None:
        self._note_routes(request)
        self._release(request, cache_kv)
        request.computed_len = 0
        self._waiting.push_front(self._queued_request(request, first=False))

    def _release(self, request: Request, cache_kv: bool) -> None:
        computed = request.tokens[: request.computed_len] if cache_kv else []
        self.memory.release(request.row, computed)
        request.row = -1

    def _queued_request(self, request: Request, first: bool) -> QueuedRequest:
        prompt = self._prompts[request.request_id]
        return QueuedRequest(
            request=request, tokens=_int32(request.tokens), prompt=prompt, first=first
        )


def _nothing_expected(request: Request) -> float:
    return 0.0


def _int32(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)
