"""Multi-token prediction: a chain of draft networks, one for each token ahead.

DeepSeek-AI 2024 ("DeepSeek-V3 Technical Report", section 2.2), Gloeckle et al. 2024. Row i of step
k joins token i + k + 1 to the hidden state of position i: the target's for step 0, that of step
k - 1 after it. It tells of token i + k + 2. So every step reads a sequence of its own, and has keys
and values of its own.

Below the known tokens a tree's nodes stand in for those that follow. The k-th level of a tree is
told of by step k: all nodes down to that level are its rows, a node of depth d at d - 1 positions
behind the step's last known one, with the hidden state that step k - 1 gave its parent. They go
into scratch slots; when the true tokens are known those positions are run again.

Legend: B entries, G entries whose trees grow, K steps, N nodes run so far, F those of the last
level, T rows, E hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.graphs.captured_runs import CapturedRuns
from rollout.models.draft_model import DraftModel
from rollout.models.features import Features
from rollout.ops import gpu
from rollout.transfers import upload
from rollout.types import Batch, DraftTrees, Request, Scheduled
from spec_workers.draft_tree import only_roots, spread
from spec_workers.neural.chain_extend import ChainExtension
from spec_workers.neural.chain_levels import ChainLevels
from spec_workers.neural.chain_nodes import ChainNodes, NodeLevel
from spec_workers.neural.chain_state import ChainState
from spec_workers.neural.device_proposal import DeviceProposer, Wanted
from spec_workers.neural.draft_kv import DraftKv
from spec_workers.neural.draft_runner import DraftRunner, NodeRows
from spec_workers.neural.guesses import Guesser, HostGuesses
from spec_workers.neural.tree_growth import Expansion, TreeGrowth
from spec_workers.observation import Observation
from spec_workers.target import TargetWorker


class MultiLayerEagleDrafter:
    """See `Drafter`. Each step has its own runner: network, KV pool, ``req_to_token`` and plans."""

    def __init__(
        self,
        target: TargetWorker,
        models: Sequence[DraftModel],
        *,
        topk: int,
        num_draft_tokens: int,
        lockstep: bool = False,
        graphs: CapturedRuns | None = None,
    ) -> None:
        """
        Args:
            target: whose features the first step reads; the draft's KV is made to go with its.
            models: one for each step; one network may stand for several steps.
            topk: most children of a node, and most nodes of a level that are expanded.
            num_draft_tokens: most nodes of a tree.
            lockstep: run every step in every call, whatever there is to run.
            graphs: on a GPU, capture proposals; default: each is launched anew.
        """
        self.features: Features = models[0].spec.features
        self.sources = (models[0].spec.family.value,)
        self.max_draft_tokens = num_draft_tokens
        self._target = target
        self._topk = topk
        self.lockstep = lockstep
        self._nodes_per_tree = topk * (len(models) - 1)
        rows = target.memory.req_to_token.max_rows
        self.runners = [
            DraftRunner(
                model,
                DraftKv(
                    target.memory,
                    target.kv_pool,
                    model.spec,
                    num_scratch=rows * self._nodes_per_tree,
                    dtype=model.dtype,
                    device=model.device,
                    horizon=step + 1,
                ),
                minimum_rows=target.minimum_rows,
                nodes_per_tree=self._nodes_per_tree,
            )
            for step, model in enumerate(models)
        ]
        self._device = models[0].device
        like = torch.empty(0, dtype=models[0].dtype, device=self._device)
        self._state = ChainState(rows, len(models), models[0].spec.hidden_size, like)
        self._guesser = Guesser(topk, models[0].token_ids_D)
        self._counters = dict.fromkeys(("extended", "nodes", "levels", "trees"), 0)
        self._graphs = graphs
        self._proposer = self._device_proposer() if gpu.runs_on(self._device) else None

    def _device_proposer(self) -> DeviceProposer:
        return DeviceProposer(
            ChainLevels(self.runners, self._state, topk=self._topk),
            self._guesser,
            topk=self._topk,
            num_steps=len(self.runners),
            device=self._device,
            lockstep=self.lockstep,
            graphs=self._graphs,
        )

    def propose(
        self, batch: Batch, floor: float, entries: Collection[int] | None = None
    ) -> DraftTrees:
        last_BK = self._state.last([entry.request for entry in batch.entries])
        growing = [
            b
            for b, entry in enumerate(batch.entries)
            if (entries is None or b in entries)
            and entry.samples
            and entry.run_len == 1
            and len(entry.draft_slots)
            and last_BK[b, 0] == entry.end - 2
        ]
        if not growing and not self.lockstep:
            return only_roots(len(batch.entries))
        wanted = self._wanted(batch, growing, last_BK[growing], floor)
        self._counters["trees"] += len(growing)
        if self._proposer is None:
            trees = self._grown(wanted)
        else:
            proposal = self._proposer.propose(wanted)
            trees = proposal.trees(wanted.sizes_G, source=0)
            self._counters["levels"] += proposal.num_levels
            self._counters["nodes"] += proposal.num_nodes
        return spread(trees, growing, len(batch.entries))

    def _wanted(
        self, batch: Batch, growing: list[int], last_GK: NDArray[np.int64], floor: float
    ) -> Wanted:
        entries = [batch.entries[b] for b in growing]
        rows_G = np.array([entry.request.row for entry in entries], dtype=np.int64)
        ends_G = np.array([entry.end for entry in entries], dtype=np.int64)
        sizes_G = np.array([len(entry.draft_slots) for entry in entries], dtype=np.int64)
        return Wanted(
            batch=batch,
            entries_G=growing,
            rows_G=rows_G,
            ends_G=ends_G,
            sizes_G=np.minimum(sizes_G, self.max_draft_tokens),
            depths_G=np.minimum(sizes_G, self._reach(entries, rows_G, ends_G, last_GK)),
            floor=floor,
        )

    def _grown(self, wanted: Wanted) -> DraftTrees:
        """Level by level, each read when it has run."""
        rows_G, count = wanted.rows_G, len(wanted.rows_G)
        growth = TreeGrowth(
            wanted.sizes_G,
            wanted.depths_G,
            topk=self._topk,
            max_nodes=self._nodes_per_tree,
            floor=wanted.floor,
        )
        guesses = self._guesser.begin(wanted.batch, wanted.entries_G)
        trees_F, depths_F = np.arange(count), np.zeros(count, dtype=np.int64)
        at_G = self._tensor(rows_G)
        hidden_FE = self._state.hidden(0, at_G)
        growth.add(None, *self._children(0, guesses, hidden_FE, trees_F, depths_F))
        nodes = ChainNodes()
        hidden_TE = hidden_FE[:0]
        for step in range(1, len(self.runners)):
            expansion = growth.expand()
            if not len(expansion.trees_F) and not self.lockstep:
                break
            level = nodes.run(expansion)
            before_TE = torch.cat([hidden_TE, self._state.hidden(step - 1, at_G)])
            hidden_TE = self._run(step, expansion, level, before_TE, rows_G, wanted.ends_G)
            guesses.levels.append(expansion)
            hidden_FE = hidden_TE[self._tensor(level.new_rows_F)]
            trees_F, depths_F = expansion.trees_F, expansion.depths_F
            growth.add(expansion, *self._children(step, guesses, hidden_FE, trees_F, depths_F))
            self._counters["levels"] += 1
            self._counters["nodes"] += len(level.trees_T)
        return growth.finish(source=0)

    def _reach(
        self,
        entries: Sequence[Scheduled],
        rows_G: NDArray[np.int64],
        ends_G: NDArray[np.int64],
        last_GK: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Levels the trees can have: as many as there are steps, one behind the other, that have
        something to attend to, and the hidden state that their first nodes take."""
        tokens_G = [entry.request.tokens for entry in entries]
        reach_G = np.ones(len(entries), dtype=np.int64)
        goes_on_G = np.ones(len(entries), dtype=bool)
        for step in range(1, len(self.runners)):
            kv, first_G = self.runners[step].kv, ends_G - 1 - step
            kv.follow(rows_G, np.maximum(first_G, 0), tokens_G)
            goes_on_G &= (last_GK[:, step - 1] == first_G) & (kv.lens_Q[rows_G] > 0)
            reach_G += goes_on_G
        return reach_G

    def _run(
        self,
        step: int,
        expansion: Expansion,
        level: NodeLevel,
        before_TE: torch.Tensor,
        rows_G: NDArray[np.int64],
        ends_G: NDArray[np.int64],
    ) -> torch.Tensor:
        """``before_TE``: what the step before gave of its nodes, then of the roots."""
        nodes = NodeRows(
            rows_B=rows_G[expansion.trees_B],
            bands_B=expansion.trees_B,
            counts_B=expansion.counts_B,
            new_B=expansion.counts_B,
            masks_N=expansion.masks_N,
            input_ids_T=level.tokens_T,
            positions_T=ends_G[level.trees_T] - 2 - step + level.depths_T,
        )
        return self.runners[step].run_nodes(nodes, before_TE[self._tensor(level.sources_T)])

    def _children(
        self,
        step: int,
        guesses: HostGuesses,
        hidden_FE: torch.Tensor,
        trees_F: NDArray[np.int64],
        depths_F: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        logits_FD = self.runners[step].logits(hidden_FE)
        return self._guesser.children(guesses, logits_FD, trees_F, depths_F)

    @torch.inference_mode()
    def observe(self, step: Observation, *, prompts_alone: bool = False) -> None:
        requests = [entry.request for entry in step.batch.entries]
        extension = ChainExtension(step, len(self.runners), prompts_alone=prompts_alone)
        rows_B = extension.runs.rows_B
        last_BK = self._state.last(requests)
        self._state.begin(requests)
        at = upload({"rows": rows_B, "query_rows": extension.sources_T}, self._device)
        features_TF = step.forwarded.features_TF[at["query_rows"]]
        features_TF = self._target.runner.features.select(features_TF, self.features)
        inputs_TE = self.runners[0].fuse(features_TF)
        for k, runner in enumerate(self.runners):
            kept_BE = self._state.hidden(k, at["rows"])
            runs, hidden_TE = extension.runs, runner.extend(extension.runs, inputs_TE)
            any_B = runs.lens_B > 0
            positions_B = extension.ends_B[any_B] - 1
            index = {"last_rows": np.cumsum(runs.lens_B)[any_B] - 1, "rows": runs.rows_B[any_B]}
            if k + 1 < len(self.runners):
                extension.advance(last_BK[:, k], last_BK[:, k + 1])
                index["sources"] = extension.sources_T
            own = upload(index, self._device)
            last_BE = hidden_TE[own["last_rows"]]
            self._state.keep(k, index["rows"], positions_B, own["rows"], last_BE)
            if k + 1 < len(self.runners):
                inputs_TE = torch.cat([hidden_TE, kept_BE])[own["sources"]]
        self._guesser.learn(step.batch, step.results)
        self._counters["extended"] += len(features_TF)

    def _tensor(self, rows: NDArray[np.int64]) -> torch.Tensor:
        return upload({"rows": rows}, self._device)["rows"]

    def release(self, request: Request) -> None:
        self._state.forget_request(request)

    def weights_changed(self) -> None:
        self._state.forget()
        for runner in self.runners:
            runner.kv.forget()

    def counters(self) -> dict[str, float]:
        """Positions extended, trees grown, levels and nodes run for them, since the beginning."""
        return {f"draft/{name}": float(count) for name, count in self._counters.items()}
