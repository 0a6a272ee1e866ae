"""EAGLE, EAGLE-2 and EAGLE-3: one draft network that reads its own hidden states further down.

EAGLE (Li et al. 2024a), EAGLE-2 (Li et al. 2024b: dynamic trees), EAGLE-3 (Li et al. 2025). A row
of the draft joins the hidden state of a position to the token behind it, and tells of the token
after that. At known positions the hidden states are the target's; below, in the tree, the draft's.

Legend: B entries, G entries whose trees grow, F rows of a level, T rows of the target, E hidden.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.graphs.captured_runs import CapturedRuns
from rollout.models.draft_model import DraftModel
from rollout.models.features import Features
from rollout.ops import gpu
from rollout.transfers import upload
from rollout.types import Batch, DraftTrees, Request
from spec_workers.draft_tree import only_roots, spread
from spec_workers.neural.device_proposal import DeviceProposer, Wanted
from spec_workers.neural.draft_extend import Extension
from spec_workers.neural.draft_kv import DraftKv
from spec_workers.neural.draft_roots import DraftRoots
from spec_workers.neural.draft_runner import DraftRunner, NodeRows
from spec_workers.neural.eagle_levels import EagleLevels
from spec_workers.neural.guesses import Guesser, HostGuesses
from spec_workers.neural.tree_growth import Expansion, TreeGrowth
from spec_workers.observation import Observation
from spec_workers.target import TargetWorker


class EagleDrafter:
    """See `Drafter`."""

    def __init__(
        self,
        target: TargetWorker,
        model: DraftModel,
        *,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        lockstep: bool = False,
        graphs: CapturedRuns | None = None,
    ) -> None:
        """
        Args:
            target: whose features the draft reads; the draft's KV is made to go with its.
            num_steps: depth of a tree.
            topk: most children of a node, and most nodes of a level that are expanded.
            num_draft_tokens: most nodes of a tree.
            lockstep: run every level in every step, whatever there is to run.
            graphs: on a GPU, capture proposals; default: each is launched anew.
        """
        self.model = model
        self.features: Features = model.spec.features
        self.sources = (model.spec.family.value,)
        self.max_draft_tokens = num_draft_tokens
        self._target = target
        self._num_steps = num_steps
        self._topk = topk
        self.lockstep = lockstep
        self._nodes_per_tree = topk * (num_steps - 1)
        rows = target.memory.req_to_token.max_rows
        kv = DraftKv(
            target.memory,
            target.kv_pool,
            model.spec,
            num_scratch=rows * self._nodes_per_tree,
            dtype=model.dtype,
            device=model.device,
        )
        self.runner = DraftRunner(
            model, kv, minimum_rows=target.minimum_rows, nodes_per_tree=self._nodes_per_tree
        )
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        self._roots = DraftRoots(rows, model.spec.hidden_size, like)
        self._guesser = Guesser(topk, model.token_ids_D)
        self._counters = dict.fromkeys(("extended", "nodes", "levels", "trees"), 0)
        self._graphs = graphs
        self._proposer = self._device_proposer() if gpu.runs_on(model.device) else None

    def _device_proposer(self) -> DeviceProposer:
        return DeviceProposer(
            EagleLevels(self.runner, self._roots, topk=self._topk, num_steps=self._num_steps),
            self._guesser,
            topk=self._topk,
            num_steps=self._num_steps,
            device=self.model.device,
            lockstep=self.lockstep,
            graphs=self._graphs,
        )

    def propose(
        self, batch: Batch, floor: float, entries: Collection[int] | None = None
    ) -> DraftTrees:
        growing = [
            b
            for b, entry in enumerate(batch.entries)
            if (entries is None or b in entries)
            and entry.samples
            and len(entry.draft_slots)
            and self._roots.has(entry)
        ]
        if not growing and not self.lockstep:
            return only_roots(len(batch.entries))
        wanted = self._wanted(batch, growing, floor)
        self._counters["trees"] += len(growing)
        if self._proposer is None:
            trees = self._grown(wanted)
        else:
            proposal = self._proposer.propose(wanted)
            trees = proposal.trees(wanted.sizes_G, source=0)
            self._counters["levels"] += proposal.num_levels
            self._counters["nodes"] += proposal.num_nodes
        return spread(trees, growing, len(batch.entries))

    def _wanted(self, batch: Batch, growing: list[int], floor: float) -> Wanted:
        entries = [batch.entries[b] for b in growing]
        rows_G = np.array([entry.request.row for entry in entries], dtype=np.int64)
        ends_G = np.array([entry.end for entry in entries], dtype=np.int64)
        sizes_G = np.array([len(entry.draft_slots) for entry in entries], dtype=np.int64)
        kv = self.runner.kv
        kv.follow(rows_G, ends_G - 1, [entry.request.tokens for entry in entries])
        return Wanted(
            batch=batch,
            entries_G=growing,
            rows_G=rows_G,
            ends_G=ends_G,
            sizes_G=np.minimum(sizes_G, self.max_draft_tokens),
            # Below its first level a tree needs something to attend to.
            depths_G=np.where(kv.lens_Q[rows_G] > 0, np.minimum(sizes_G, self._num_steps), 1),
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
        hidden_FE = self._roots.hidden(self._sent(rows_G))
        trees_F, depths_F = np.arange(count), np.zeros(count, dtype=np.int64)
        growth.add(None, *self._children(guesses, hidden_FE, trees_F, depths_F))
        for _ in range(self._num_steps - 1):
            level = growth.expand()
            if not len(level.trees_F) and not self.lockstep:
                break
            hidden_FE = self._run(level, rows_G, wanted.ends_G, hidden_FE)
            guesses.levels.append(level)
            growth.add(level, *self._children(guesses, hidden_FE, level.trees_F, level.depths_F))
            self._counters["levels"] += 1
            self._counters["nodes"] += len(level.trees_F)
        return growth.finish(source=0)

    def _run(
        self,
        level: Expansion,
        rows_G: NDArray[np.int64],
        ends_G: NDArray[np.int64],
        parents_FE: torch.Tensor,
    ) -> torch.Tensor:
        nodes = NodeRows(
            rows_B=rows_G[level.trees_B],
            bands_B=level.trees_B,
            counts_B=level.counts_B,
            new_B=level.new_B,
            masks_N=level.masks_N,
            input_ids_T=level.tokens_F,
            positions_T=ends_G[level.trees_F] + level.depths_F - 2,
        )
        return self.runner.run_nodes(nodes, parents_FE[self._sent(level.parent_rows_F)])

    def _sent(self, rows: NDArray[np.int64]) -> torch.Tensor:
        return upload({"rows": rows}, self.model.device)["rows"]

    def _children(
        self,
        guesses: HostGuesses,
        hidden_FE: torch.Tensor,
        trees_F: NDArray[np.int64],
        depths_F: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        logits_FD = self.runner.logits(hidden_FE)
        return self._guesser.children(guesses, logits_FD, trees_F, depths_F)

    @torch.inference_mode()
    def observe(self, step: Observation, *, prompts_alone: bool = False) -> None:
        extension = Extension.of(step, prompts_alone=prompts_alone)
        requests = [step.batch.entries[b].request for b in extension.entries_R]
        index = upload(
            {
                "query_rows": extension.query_rows_T,
                "last_rows": extension.last_rows_R,
                "rows": np.array([request.row for request in requests], dtype=np.int64),
            },
            self.model.device,
        )
        features_TF = self._target.runner.features.select(
            step.forwarded.features_TF[index["query_rows"]], self.features
        )
        hidden_TE = self.runner.extend(extension.runs, self.runner.fuse(features_TF))
        last_RE = hidden_TE[index["last_rows"]]
        self._roots.keep(requests, extension.ends_R, index["rows"], last_RE)
        self._guesser.learn(step.batch, step.results)
        self._counters["extended"] += len(features_TF)

    def release(self, request: Request) -> None:
        self._roots.forget_request(request)

    def weights_changed(self) -> None:
        self.runner.kv.forget()
        self._roots.forget()

    def counters(self) -> dict[str, float]:
        """Positions extended; trees grown, levels and nodes run for them. Over its life."""
        return {f"draft/{name}": float(count) for name, count in self._counters.items()}
