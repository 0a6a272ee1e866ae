"""The target model, its memory and its runner: what every worker verifies with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rollout.config import EngineConfig
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.checkpoint import Progress
from rollout.models.loader import resolve_device
from rollout.models.spec import ModelSpec
from rollout.parallel import local_rank, open_ranks
from rollout.runner.dummy_run import DummyRun
from rollout.runner.graphs import graphs_of_model
from rollout.runner.graphs.capture import Capture
from rollout.runner.memory_regions import MemoryRegions
from rollout.runner.memory_saver import MemorySaver
from rollout.runner.model_runner import Forwarded, ModelRunner
from rollout.sampling.sampler import Sampled, TreeSampler, TreeSamples
from rollout.types import (
    MAX_TREE_NODES,
    NO_EXTRAS,
    Batch,
    DraftTrees,
    EntryResult,
    FinishReason,
    Request,
    TokenExtras,
)
from spec_workers.target.builders import (
    agreed_limits,
    agreed_minimum_rows,
    open_model,
    open_weights,
)
from spec_workers.target.cpu_threads import choose_threads, may_choose_threads
from spec_workers.target.draft_sizing import NO_DRAFT, DraftBytes, draft_graph_bytes
from spec_workers.target.memory import bytes_of_steps, routes_spec, target_memory
from spec_workers.target.rank_settings import check_settings
from spec_workers.target.scorer import Scorer, joined
from spec_workers.target.trial_forwards import trial_forwards


class TargetWorker:
    """Owns the target. A draft of nothing but the root makes it plain decoding."""

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        features: AuxHiddenStates | None = None,
        draft_bytes: DraftBytes = NO_DRAFT,
        draft_nodes: int = MAX_TREE_NODES - 1,
        capture: Capture | None = None,
    ) -> None:
        """
        Args:
            progress: told how far the weights are read.
            features: hidden states that drafts read of every row.
            draft_bytes: the bytes that a draft's keys and values are going to take.
            draft_nodes: most of a request in one step; memory is reserved for so many.
            capture: how forwards are captured; default: see `graphs_of_model`.
        """
        device = resolve_device(config.model.device, local_rank(config.parallel))
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        if config.model.record_routes:  # before the weights, which may take minutes to read
            routes_spec(config, ModelSpec.read(Path(config.model.path)))
        self.ranks = open_ranks(config.parallel, device)
        with self.ranks.all_or_none("while it started"):
            check_settings(self.ranks.all, config, device)
            regions = MemoryRegions.on(device)
            self.model = open_model(config, device, self.ranks, regions, progress)
            self.model_dtype, self.model_device = self.model.dtype, self.model.device
            self.vocab_size = self.model.spec.vocab_size
            self.max_context_len = self.model.spec.max_context_len
            self.eos_token_ids = self.model.spec.eos_token_ids
            self.weights = open_weights(config, self.model, self.ranks)
            self.limits = limits = agreed_limits(config, self.model, self.ranks)
            self.longest_step = limits.max_step_tokens + limits.max_running * (MAX_TREE_NODES - 1)
            self.minimum_rows = agreed_minimum_rows(
                config, self.model, self.ranks, self.longest_step
            )
            steps = DummyRun(self.model, features, exact=config.exact)
            memory = target_memory(
                config, limits, self.model, self.ranks.all, regions=regions,
                draft_bytes=draft_bytes,
                reserved_bytes=bytes_of_steps(config.memory, limits, steps, draft_nodes),
            )  # fmt: skip
            self.memory, self.kv_pool = memory.index, memory.kv_pool
            self.state_pool = memory.state_pool
            left = 0 if draft_bytes is NO_DRAFT else draft_graph_bytes(config.memory)
            own = replace(config.memory, graph_bytes=config.memory.graph_bytes - left)
            self.graphs = graphs_of_model(own, self.model, self.minimum_rows, capture)
            self.memory_saver = MemorySaver(
                self.weights,
                memory.pools,
                graphs=None if self.graphs is None else self.graphs.graph_runner,
                host_pools=memory.host_pools,
                regions=regions,
                device=device,
            )
            self.runner = ModelRunner(
                model=self.model,
                kv_pool=self.kv_pool,
                memory=self.memory,
                state_pool=self.state_pool,
                minimum_rows=self.minimum_rows,
                device=device,
                features=None if self.follows else features,  # drafts are rank 0's
                graphs=self.graphs,
                chunked_kernel=steps.chunked_kernel,
            )
            self._scorer = Scorer(
                self.memory,
                self.runner,
                self.ranks.rows,
                chunk_len=min(limits.chunk_len, limits.max_step_tokens),
            )
            self._choose_threads(config)

    def _choose_threads(self, config: EngineConfig) -> None:
        is_alone = self.model.device.type == "cpu" and self.ranks.all.size == 1
        if not is_alone or config.num_threads is not None or not may_choose_threads():
            return
        # The tail of a batch counts as much as its beginning.
        sizes = (1, self.limits.max_running)
        with trial_forwards(self.memory, self.runner, sizes) as forwards:
            choose_threads(forwards)
        if self.graphs is not None:
            self.graphs.graph_runner.drop()  # those of other numbers of threads

    @property
    def follows(self) -> bool:
        """Whether this rank runs what another one tells, and nothing else."""
        return self.ranks.tensor.rank > 0

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Numbers of rows that forwards are padded to; larger ones run as they are. Empty where
        they are padded by so little that it does not matter."""
        if self.graphs is None or self.graphs.buckets.fine:
            return ()
        return self.graphs.buckets.rows

    @torch.inference_mode()
    def verify(self, batch: Batch, trees: DraftTrees) -> tuple[Forwarded, TreeSampler]:
        """A forward, and a sample at each sampling entry's root and draft nodes, with each tree's
        walk. On a GPU nothing waits."""
        self.weights.require_whole()
        sampler = TreeSampler(batch, trees)
        return self.runner.forward(batch, trees, sampler.take), sampler

    def entry_results(self, batch: Batch, samples: TreeSamples) -> list[EntryResult]:
        """The accepted path and emitted tokens of each entry; stops and limits cut a path short."""
        offsets = samples.offsets_B1.tolist()
        return [
            self._result(entry.request, samples.sampled, first, path, last - first - 1)
            if entry.samples
            else EntryResult()
            for entry, path, first, last in zip(
                batch.entries, samples.paths, offsets, offsets[1:], strict=False
            )
        ]

    def _result(
        self, request: Request, sampled: Sampled, first: int, path: list[int], drafted: int
    ) -> EntryResult:
        tokens, logprobs = sampled.tokens, sampled.logprobs
        token_ids, token_logprobs = [tokens[first]], [logprobs[first]]
        if path:
            token_ids += [tokens[first + node] for node in path]
            token_logprobs += [logprobs[first + node] for node in path]
        if min(token_ids) < 0:
            del token_ids[next(k for k, token in enumerate(token_ids) if token < 0) :]
            if not token_ids:
                what = f"the logits at position {len(request.tokens)} hold NaN or +inf: "
                what += "the weights, or an update of them, are broken"
                if request.constraints:
                    what += "; or the grammar has become too complex there, or constraints allow "
                    what += "no token"
                return EntryResult(
                    num_drafted=drafted, finish_reason=FinishReason.ERROR, error=what
                )
        room = min(request.max_len, self.max_context_len) - len(request.tokens)
        del token_ids[room:]
        emitted, reason = request.stop_check.first_stop(request, token_ids)
        if reason is None and emitted == room:
            reason = FinishReason.LENGTH
        if emitted <= len(path):
            del token_ids[emitted:], token_logprobs[emitted:]
            path = path[: emitted - 1]
        extras = NO_EXTRAS
        if request.params.wants_extras:
            extras = joined([sampled.extras[first + node] for node in [0, *path]])
        return EntryResult(
            token_ids=token_ids,
            logprobs=token_logprobs,
            extras=extras,
            path=path,
            num_drafted=drafted,
            finish_reason=reason,
        )

    def commit(self, batch: Batch, results: list[EntryResult]) -> None:
        """Move KV and states along the accepted paths, once."""
        self.memory.commit(batch.entries, [result.path for result in results])

    @torch.inference_mode()
    def score(
        self,
        request: Request,
        output_ids: list[int],
        observe: Callable[[torch.Tensor], object] | None = None,
    ) -> tuple[list[float], TokenExtras]:
        """Logprobs of given tokens after the request's: bit for bit those generation reports.
        ``observe``: called with the logits [R, V] of their rows, block by block.

        Raises OutOfMemoryError when the KV slots cannot hold the sequence, or no state slots can be
        had.
        """
        self.weights.require_whole()
        scored = self._scorer.score(request, output_ids, observe)
        self.ranks.all.require_all()
        return scored

    def score_idle(self) -> None:
        """Enter the forwards of ranks in lockstep that score, with nothing to score."""
        self._scorer.score_idle()

    def counters(self) -> dict[str, float]:
        """Gauges of KV slots, window slots and recurrent states, for metrics."""
        usage, counters = self.memory.usage, self.memory.counters
        return {
            **self.memory.layer_slots.counters(),
            "kv/used": usage.used,
            "kv/cached": usage.cached,
            "kv/free": usage.free,
            "kv/looked_up": counters.looked_up,
            "kv/hit": counters.hit,
            "kv/evicted": counters.evicted,
        }
