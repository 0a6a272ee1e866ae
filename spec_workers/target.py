"""The target model, its memory and its runner: what every worker verifies with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from rollout.config import EngineConfig, LoadFormat
from rollout.device_name import device_name
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.graphs import Buckets, ForwardGraphs
from rollout.graphs.capture import Capture, CudaCapture
from rollout.layers.row_invariance import make_row_invariant
from rollout.memory.activations import activation_bytes
from rollout.memory.cache import CacheMemory
from rollout.memory.kv_pool import KvPool
from rollout.memory.routes_pool import RoutesPool
from rollout.memory.sizing import memory_budget, num_kv_slots
from rollout.memory.state_pool import StatePool
from rollout.memory.state_sizing import state_sizes
from rollout.memory.system import free_bytes
from rollout.models.features import Features
from rollout.models.layer_spec import ExpertsSpec
from rollout.models.loader import Progress, load_model, resolve_device
from rollout.models.spec import ModelSpec
from rollout.ops.gated_delta_rule.chunked import PieceKernel
from rollout.ops.gated_delta_rule.fla import piece_kernel
from rollout.parallel import local_rank, open_ranks
from rollout.residency import Residency
from rollout.runner import Forwarded, ModelRunner
from rollout.sampling.rows import rows_of_continuation
from rollout.sampling.sampled import Sampled
from rollout.sampling.sampler import score
from rollout.sampling.tree_sampling import sample_trees
from rollout.types import (
    MAX_TREE_NODES,
    Batch,
    DraftTrees,
    EntryResult,
    FinishReason,
    Request,
    Scheduled,
    TokenExtras,
)
from rollout.weights.transaction import WeightTransaction
from spec_workers.draft_tree import only_roots
from spec_workers.neural.draft_sizing import NO_DRAFT, DraftBytes

log = logging.getLogger(__name__)

_QUICKEST_ROWS = 4
"""oneDNN's products of fewer rows are slower than those of four: with the demo model in bf16 a step
of one row took 16.0 ms, a step of four 14.2."""


class TargetWorker:
    """Owns the target. A draft of nothing but the root makes it plain decoding."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        features: Features | None = None,
        draft_bytes: DraftBytes = NO_DRAFT,
        capture: Capture | None = None,
    ) -> None:
        """
        Args:
            progress: told how far the weights are read.
            features: hidden states that drafts want of every row.
            draft_bytes: what a draft's keys and values are going to take.
            capture: how forwards are captured; default: as CUDA graphs on a GPU, else not at all.
        """
        device = resolve_device(config.model.device, local_rank(config.parallel))
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.ranks = open_ranks(config.parallel, device)
        self.checks_ranks = config.parallel.check and self.ranks.tensor.size > 1
        self.model = load_model(
            config.model.path,
            config.model.dtype,
            device,
            config.model.max_context_len,
            load_format=config.model.load_format,
            ranks=self.ranks,
            progress=progress,
        )
        spec = self.model.spec
        self.vocab_size = spec.vocab_size
        self.max_context_len = spec.max_context_len
        self.eos_token_ids = spec.eos_token_ids
        self.weights = WeightTransaction(
            {"target": self.model},
            passes_over=spec.passes_over,
            ranks=self.ranks.all,
        )
        if config.model.load_format is LoadFormat.dummy:
            self.weights.tear(["target"], "model.load_format=dummy loads none")
        scheduler = config.scheduler
        self.longest_step = scheduler.max_step_tokens + scheduler.max_running * (MAX_TREE_NODES - 1)
        self.minimum_rows = _QUICKEST_ROWS if device.type == "cpu" else 1
        if config.exact:
            most_rows = self.longest_step * self.ranks.rows.size
            exact_rows = make_row_invariant(self.model.linears(), most_rows)
            self.minimum_rows = max(self.minimum_rows, *self.ranks.all.numbers(exact_rows))
        # All schedule alike, so all have as many slots of each kind.
        reserved_bytes = self._reserved_bytes(config, device)
        budget = memory_budget(config.memory, device, reserved_bytes)
        budget = min(self.ranks.all.numbers(budget))
        recurrent, states, state_bytes = spec.linear_attention, None, 0
        if recurrent is not None:
            each = StatePool.bytes_per_slot(recurrent, self.model.dtype)
            states = state_sizes(config.memory, scheduler, each, budget)
            state_bytes = each * (states.num_slots + 1)
        routes = _routes_spec(config, spec)
        routes_bytes = 0 if routes is None else RoutesPool.bytes_per_slot(routes)
        num_slots = num_kv_slots(
            config.memory,
            spec,
            self.model.dtype,
            budget,
            draft_slot_bytes=draft_bytes.per_slot,
            routes_slot_bytes=routes_bytes if device.type == "cpu" else 0,  # they are on the host
            draft_bytes=draft_bytes.apart,
            state_bytes=state_bytes,
        )
        num_slots = min(self.ranks.all.numbers(num_slots))
        # One row more than requests may run: scoring borrows it between steps.
        self.memory = CacheMemory(
            num_slots,
            config.scheduler.max_running + 1,
            self.max_context_len,
            config.memory.prefix_cache,
            states,
            None if routes is None else RoutesPool(routes, num_slots),
        )
        self._chunk_len = min(scheduler.chunk_len, scheduler.max_step_tokens)
        self.kv_pool = KvPool(
            num_layers=len(spec.attention_layers),
            num_slots=num_slots,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.model.dtype,
            device=device,
        )
        self.state_pool: StatePool | None = None
        if recurrent is not None and states is not None:
            self.state_pool = StatePool(
                recurrent, num_slots=states.num_slots, dtype=self.model.dtype, device=device
            )
        pools = [self.kv_pool, self.state_pool, self.memory.routes]
        if capture is None and device.type == "cuda":
            capture = CudaCapture(device)
        self.graphs = None if capture is None else self._forward_graphs(config, capture)
        self.residency = Residency(
            self.weights,
            [pool for pool in pools if pool is not None],
            graphs=self.graphs,
            device=device,
        )
        self.runner = ModelRunner(
            model=self.model,
            kv_pool=self.kv_pool,
            memory=self.memory,
            state_pool=self.state_pool,
            minimum_rows=self.minimum_rows,
            device=device,
            features=features,
            graphs=self.graphs,
            piece_kernel=self._piece_kernel(config),
        )

    def _piece_kernel(self, config: EngineConfig) -> PieceKernel | None:
        if config.exact or self.state_pool is None:
            return None
        return piece_kernel(self.state_pool.recurrent[0], self.model.dtype)

    def _reserved_bytes(self, config: EngineConfig, device: torch.device) -> int:
        """What steps and graphs will want on a GPU, where KV is sized by what is free."""
        if device.type != "cuda" or config.memory.kv_bytes is not None:
            return 0
        sampled = min(self.longest_step, config.scheduler.max_running * MAX_TREE_NODES)
        activations = activation_bytes(self.model, rows=self.longest_step, sampled=sampled)
        log.info(
            "%s: %d MiB are free beside the weights; a step takes up to %d MiB of them, CUDA "
            "graphs %d MiB, KV %.0f %% of the rest",
            device,
            free_bytes(device) >> 20,
            activations >> 20,
            config.memory.graph_bytes >> 20,
            config.memory.kv_fraction * 100,
        )
        return activations + config.memory.graph_bytes

    def _forward_graphs(self, config: EngineConfig, capture: Capture) -> ForwardGraphs | None:
        """None where nothing may be captured: sparse layers choose sizes as they run, recurrent
        ones are told slots of their own, and ranks wait for each other."""
        spec, memory = self.model.spec, config.memory
        varies = spec.experts is not None or spec.linear_attention is not None
        if not memory.graph_bytes or varies or self.ranks.all.size > 1:
            return None
        buckets = Buckets(
            max_rows=memory.graph_rows,
            max_context_len=self.max_context_len,
            minimum_rows=self.minimum_rows,
        )
        return ForwardGraphs(
            buckets, max_bytes=memory.graph_bytes, capture=capture, device=self.model.device
        )

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Numbers of rows that forwards are padded to; larger ones run as they are."""
        return () if self.graphs is None else self.graphs.buckets.rows

    @property
    def description(self) -> str:
        """What the time of a forward depends on, beside the batch."""
        spec, dtype = self.model.spec, str(self.model.dtype).removeprefix("torch.")
        padding = f"padded to {self.minimum_rows} rows"
        if self.row_buckets:
            padding += f", captured up to {self.row_buckets[-1]}"
        return (
            f"{device_name(self.model.device)}; {spec.num_layers} layers of {spec.hidden_size}, "
            f"vocabulary of {spec.vocab_size}, {dtype}, {padding}"
        )

    def room_for(self, request: Request) -> int:
        """Tokens the request may still emit."""
        return min(request.remaining_len, self.max_context_len - len(request.tokens))

    def verify(self, batch: Batch, trees: DraftTrees) -> Forwarded:
        """Logits at each sampling entry's root and draft nodes, in that order; features."""
        self.weights.require_whole()
        return self.runner.forward(batch, trees)

    @torch.inference_mode()
    def accept(self, batch: Batch, trees: DraftTrees, logits_RV: torch.Tensor) -> list[EntryResult]:
        """Sample every node and walk each tree; stops and limits cut what a walk emits."""
        samples = sample_trees(batch, trees, logits_RV)
        offsets = samples.offsets_B1.tolist()
        results: list[EntryResult] = []
        for b, (entry, path) in enumerate(zip(batch.entries, samples.paths, strict=True)):
            if not entry.samples:
                results.append(EntryResult())
                continue
            drafted = offsets[b + 1] - offsets[b] - 1
            results.append(self._result(entry.request, samples.sampled, offsets[b], path, drafted))
        return results

    def _result(
        self, request: Request, sampled: Sampled, first: int, path: list[int], drafted: int
    ) -> EntryResult:
        rows = [first, *(first + node for node in path)]
        broken = next((k for k, row in enumerate(rows) if sampled.tokens[row] < 0), len(rows))
        if broken == 0:
            return EntryResult(
                num_drafted=drafted,
                finish_reason=FinishReason.ERROR,
                error=f"the logits at position {len(request.tokens)} hold NaN or +inf: "
                "the weights, or an update of them, are broken",
            )
        rows, path = rows[:broken], path[: broken - 1]
        room = self.room_for(request)
        token_ids = [sampled.tokens[row] for row in rows][:room]
        kept, reason = request.stop_check.first_stop(request, token_ids)
        if reason is None and kept == room:
            reason = FinishReason.LENGTH
        rows = rows[:kept]
        return EntryResult(
            token_ids=token_ids[:kept],
            logprobs=[sampled.logprobs[row] for row in rows],
            extras=_joined([sampled.extras[row] for row in rows]),
            path=path[: kept - 1],
            num_drafted=drafted,
            finish_reason=reason,
        )

    def commit(self, batch: Batch, results: list[EntryResult]) -> None:
        """Move each entry's state along its accepted path, once."""
        for entry, result in zip(batch.entries, results, strict=True):
            self.memory.commit(entry, result.path)

    @torch.inference_mode()
    def score(self, request: Request, output_ids: list[int]) -> tuple[list[float], TokenExtras]:
        """Logprobs of given tokens after the request's: bit for bit those generation reports.

        Raises OutOfMemoryError when the KV slots cannot hold the sequence, or no state slots can be
        had.
        """
        self.weights.require_whole()
        logprobs: list[float] = []
        extras: list[TokenExtras] = []
        for logits_RV in self._scored_logits(request, output_ids[:-1]):
            done = len(logprobs)
            chunk = output_ids[done : done + len(logits_RV)]
            rows = rows_of_continuation(request, output_ids, range(done, done + len(chunk)))
            scored = score(logits_RV, rows, chunk)
            logprobs += scored.logprobs
            extras += scored.extras
        self._accompany()
        return logprobs, _joined(extras)

    def _accompany(self) -> None:
        """Enter the forwards of ranks in lockstep that have more to score, with nothing."""
        while any(self.ranks.rows.numbers(0)):
            self.runner.forward(Batch(step=0, entries=[]), only_roots(0))

    def _scored_logits(self, request: Request, continuation: list[int]) -> Iterator[torch.Tensor]:
        """Logits [R, V] from the request's last token on, chunk by chunk."""
        self.memory.end_step()
        tokens = request.tokens + continuation
        prompt = np.array(request.tokens, dtype=np.int32)
        admitted = self.memory.admit(prompt, headroom=len(continuation))
        if admitted is None:
            states = self.memory.states
            if states is not None and not states.has_seat:
                raise OutOfMemoryError(
                    f"scoring {len(tokens)} tokens: those that run need all {states.num_slots} "
                    "state slots; raise memory.state_slots or let requests finish"
                )
            raise OutOfMemoryError(
                f"scoring {len(tokens)} tokens: only {self.memory.obtainable} KV slots can be had; "
                "raise memory.kv_bytes or let requests finish"
            )
        row, start = admitted
        computed = start
        try:
            self.memory.extend(row, len(tokens))
            running = replace(request, tokens=tokens, row=row)
            while computed < len(tokens):
                self.ranks.rows.numbers(1)  # another one: see _accompany
                length = min(self._chunk_len, len(tokens) - computed)
                batch = self.batch_of(running, computed, length)
                first = len(request.tokens) - 1
                yield self.runner.forward(batch, only_roots(1), scored_from=first).logits_RV
                computed += length
                self.advance(batch)
        finally:
            self.memory.release(row, tokens[:computed])

    def batch_of(self, request: Request, start: int, run_len: int) -> Batch:
        """One run and no drafts, of a request that the scheduler does not know. It has a row, and
        slots for its tokens."""
        run = self.memory.state_run(request.row, start, start + run_len, request.prompt_len)
        entry = Scheduled(
            request=request,
            start=start,
            run_len=run_len,
            draft_slots=np.empty(0, dtype=np.int32),
            states=self.memory.reserve_states([run], [0])[0],
        )
        return Batch(step=0, entries=[entry])

    def advance(self, batch: Batch) -> None:
        """A batch of one run and no drafts was run: its request goes on from there."""
        [entry] = batch.entries
        self.memory.commit(entry, [])
        self.memory.end_step(booked=True)
        if entry.states is not None and entry.states.checkpoints:
            shared = entry.request.tokens[: max(entry.states.checkpoints)]
            self.memory.share(entry.request.row, shared)

    def counters(self) -> dict[str, float]:
        usage, counters = self.memory.usage, self.memory.counters
        states = {} if self.memory.states is None else self.memory.states.counters()
        return states | {
            "kv/used": usage.used,
            "kv/cached": usage.cached,
            "kv/free": usage.free,
            "kv/looked_up": counters.looked_up,
            "kv/hit": counters.hit,
            "kv/evicted": counters.evicted,
        }


def _routes_spec(config: EngineConfig, spec: ModelSpec) -> ExpertsSpec | None:
    """Whose routes are to be recorded; None: nobody's."""
    if not config.model.record_routes:
        return None
    if spec.experts is None:
        raise InvalidInputError(
            "model.record_routes", True, f"{spec.architecture} has no experts: leave it out"
        )
    return spec.experts


def _joined(extras: list[TokenExtras]) -> TokenExtras:
    joined = TokenExtras()
    for extra in extras:
        joined.raw_logprobs += extra.raw_logprobs
        joined.sampling_logprobs += extra.sampling_logprobs
        joined.top_logprobs += extra.top_logprobs
        joined.entropies += extra.entropies
    return joined
