"""Multi-token prediction: a chain of draft networks, one for each token ahead.

DeepSeek-AI 2024 ("DeepSeek-V3 Technical Report", section 2.2), Gloeckle et al. 2024. Row i of step
k joins token i + k + 1 to the hidden state of position i: the target's for step 0, that of step
k - 1 after it. It tells of token i + k + 2. So every step reads a sequence of its own, and has keys
and values of its own.

Below the known tokens a tree's nodes stand in for those that follow. The k-th level of a tree is
told of by step k: all nodes down to that level are its rows, a node of depth d at d - 1 positions
behind the step's last known one, with the hidden state that step k - 1 gave its parent. They go
into scratch slots; when the true tokens are known those positions are run again.

Legend: G entries whose trees grow, K steps, N nodes run so far, F those of the last
level, T rows, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.models.draft_model import DraftModel
from rollout.ops import gpu
from rollout.runner.graphs.captured_runs import CapturedRuns
from rollout.runner.transfers import upload
from rollout.types import Batch, Request, Scheduled
from spec_workers.neural.chain_extend import ChainExtension
from spec_workers.neural.chain_state import ChainLevels, ChainNodes, ChainState, NodeLevel
from spec_workers.neural.device_proposal import TreesToGrow
from spec_workers.neural.draft_kv import DraftKv
from spec_workers.neural.draft_runner import DraftRunner, NodeRows
from spec_workers.neural.guesses import HostGuesses
from spec_workers.neural.tree_drafter import TreeDrafter
from spec_workers.neural.tree_growth import Expansion, TreeGrowth
from spec_workers.observation import Observation
from spec_workers.target import TargetWorker


class MultiLayerEagleDrafter(TreeDrafter):
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
        """See `TreeDrafter`. The draft's KV is made to go with the target's.

        ``models``: one for each step; one network may stand for several steps.
        """
        super().__init__(
            target,
            models[0],
            num_steps=len(models),
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            lockstep=lockstep,
            graphs=graphs,
        )
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
        like = torch.empty(0, dtype=models[0].dtype, device=self._device)
        self._state = ChainState(rows, len(models), models[0].spec.hidden_size, like)
        if gpu.runs_on(self._device):
            self._proposer = self._device_proposer()

    def _levels(self) -> ChainLevels:
        return ChainLevels(self.runners, self._state, topk=self._topk)

    def _rooted(self, batch: Batch) -> list[bool]:
        last_BK = self._state.last([entry.request for entry in batch.entries])
        return [
            entry.run_len == 1 and bool(last == entry.end - 2)
            for entry, last in zip(batch.entries, last_BK[:, 0], strict=True)
        ]

    def _reach(
        self, entries: Sequence[Scheduled], rows_G: NDArray[np.int64], ends_G: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The number of steps, one behind the other, that have something to attend to, and
        the hidden state that their first nodes take."""
        last_GK = self._state.last([entry.request for entry in entries])
        tokens_G = [entry.request.tokens for entry in entries]
        reach_G = np.ones(len(entries), dtype=np.int64)
        goes_on_G = np.ones(len(entries), dtype=bool)
        for step in range(1, len(self.runners)):
            kv, first_G = self.runners[step].kv, ends_G - 1 - step
            kv.follow(rows_G, np.maximum(first_G, 0), tokens_G)
            goes_on_G &= (last_GK[:, step - 1] == first_G) & (kv.lens_Q[rows_G] > 0)
            reach_G += goes_on_G
        return reach_G

    def _grow(self, growth: TreeGrowth, wanted: TreesToGrow) -> None:
        rows_G, count = wanted.rows_G, len(wanted.rows_G)
        guesses = self._guesser.begin(wanted.batch, wanted.entries_G)
        trees_F, depths_F = np.arange(count), np.zeros(count, dtype=np.int64)
        at_G = self._sent(rows_G)
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
            hidden_FE = hidden_TE[self._sent(level.new_rows_F)]
            trees_F, depths_F = expansion.trees_F, expansion.depths_F
            growth.add(expansion, *self._children(step, guesses, hidden_FE, trees_F, depths_F))
            self._counters["levels"] += 1
            self._counters["nodes"] += len(level.trees_T)

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
        return self.runners[step].run_nodes(nodes, before_TE[self._sent(level.sources_T)])

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

    def release(self, request: Request) -> None:
        self._state.forget_request(request)

    def weights_changed(self) -> None:
        self._state.forget()
        for runner in self.runners:
            runner.kv.forget()
