"""EAGLE, EAGLE-2 and EAGLE-3: one draft network that reads its own hidden states further down.

EAGLE (Li et al. 2024a), EAGLE-2 (Li et al. 2024b: dynamic trees), EAGLE-3 (Li et al. 2025). A row
of the draft joins the hidden state of a position to the token behind it, and tells of the token
after that. At known positions the hidden states are the target's; below, in the tree, the draft's.

Legend: B entries, G entries whose trees grow, P of a shape, W nodes of a level, F rows of a level,
N nodes so far, T rows of the target, E hidden.
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
from spec_workers.neural.device_growth import DeviceNodes
from spec_workers.neural.device_proposal import TreesToGrow
from spec_workers.neural.draft_extend import DraftRoots, Extension
from spec_workers.neural.draft_kv import DraftKv
from spec_workers.neural.draft_runner import DraftRunner, NodeRows
from spec_workers.neural.guesses import HostGuesses
from spec_workers.neural.level_plans import LevelPlans
from spec_workers.neural.tree_drafter import TreeDrafter
from spec_workers.neural.tree_growth import Expansion, TreeGrowth
from spec_workers.observation import Observation
from spec_workers.target import TargetWorker

Tensors = dict[str, torch.Tensor]


class EagleLevels:
    """See `Levels`."""

    def __init__(
        self, runner: DraftRunner, roots: DraftRoots, *, topk: int, num_steps: int
    ) -> None:
        self._runner = runner
        self._roots = roots
        self._topk = topk
        self._plans = LevelPlans(runner, topk=topk, num_steps=num_steps)
        self.inputs = self._plans.inputs
        self.longest = self._plans.longest
        self.changes = self._plans.changes
        self.apply = self._plans.apply

    def roots(self, inputs: Tensors) -> torch.Tensor:
        return self._roots.hidden(inputs["rows"])[:, None]

    def run(
        self,
        level: int,
        nodes: DeviceNodes,
        before_GFE: torch.Tensor,
        inputs: Tensors,
        longest: int,
    ) -> torch.Tensor:
        width = self._topk
        parents_GW = (
            nodes.parents_GN[:, -width:] - (level - 2) * width
            if level > 1
            else (torch.zeros_like(nodes.parents_GN))
        )
        hidden_GWE = gathered(before_GFE, parents_GW)
        none_W = torch.zeros(width, dtype=torch.int64, device=hidden_GWE.device)
        hidden_TE = self._runner.forward(
            nodes.tokens_GN[:, -width:].flatten(),
            hidden_GWE.flatten(0, 1),
            self._plans.positions(inputs["ends"] + level - 2, none_W).flatten(),
            self._plans.slots(level, inputs)[:, -width:].flatten().long(),
            self._plans.plan(level, nodes, inputs, longest, new_levels=1),
        )
        return hidden_TE.view(hidden_GWE.shape)

    def logits(self, level: int, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._runner.logits(hidden_RE)


def gathered(hidden_GFE: torch.Tensor, rows_GW: torch.Tensor) -> torch.Tensor:
    """[G, W, E]: of each tree these rows."""
    return hidden_GFE.gather(1, rows_GW[:, :, None].expand(-1, -1, hidden_GFE.shape[2]))


class EagleDrafter(TreeDrafter):
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
        """See `TreeDrafter`. The draft's KV is made to go with the target's."""
        super().__init__(
            target,
            model,
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            lockstep=lockstep,
            graphs=graphs,
        )
        self.model = model
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
        if gpu.runs_on(model.device):
            self._proposer = self._device_proposer()

    def _levels(self) -> EagleLevels:
        return EagleLevels(self.runner, self._roots, topk=self._topk, num_steps=self._num_steps)

    def _rooted(self, batch: Batch) -> list[bool]:
        return [self._roots.has(entry) for entry in batch.entries]

    def _reach(
        self, entries: Sequence[Scheduled], rows_G: NDArray[np.int64], ends_G: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        kv = self.runner.kv
        kv.follow(rows_G, ends_G - 1, [entry.request.tokens for entry in entries])
        # Below its first level a tree needs something to attend to.
        return np.where(kv.lens_Q[rows_G] > 0, self._num_steps, 1)

    def _grow(self, growth: TreeGrowth, wanted: TreesToGrow) -> None:
        rows_G, count = wanted.rows_G, len(wanted.rows_G)
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
            self._device,
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
