"""The base of neural drafts: which trees grow, how large, and where that runs.

Legend: B entries, G entries whose trees grow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.draft_model import DraftModel
from rollout.runner.graphs.captured_runs import CapturedRuns
from rollout.runner.transfers import upload
from rollout.types import Batch, DraftTrees, Scheduled
from spec_workers.draft_tree import only_roots, spread
from spec_workers.neural.device_proposal import DeviceProposer, Levels, TreesToGrow
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.tree_growth import TreeGrowth
from spec_workers.target import TargetWorker


class TreeDrafter(ABC):
    """Grows trees level by level: on a GPU all levels are launched and then read once, elsewhere
    each is read when it has run."""

    def __init__(
        self,
        target: TargetWorker,
        model: DraftModel,
        *,
        num_steps: int,
        topk: int,
        num_draft_tokens: int,
        lockstep: bool,
        graphs: CapturedRuns | None,
    ) -> None:
        """
        Args:
            target: whose features the draft reads.
            model: the first, or only, network.
            num_steps: depth of a tree.
            topk: most children of a node, and most nodes of a level that are expanded.
            num_draft_tokens: most nodes of a tree.
            lockstep: run every level in every step, whatever there is to run.
            graphs: on a GPU, capture proposals; default: each is launched anew.
        """
        self.features: AuxHiddenStates = model.spec.features
        self.sources = (model.spec.family.value,)
        self.max_draft_tokens = num_draft_tokens
        self.lockstep = lockstep
        self._target = target
        self._device = model.device
        self._num_steps = num_steps
        self._topk = topk
        self._nodes_per_tree = topk * (num_steps - 1)
        self._guesser = Guesser(topk, model.token_ids_D)
        self._counters = dict.fromkeys(("extended", "nodes", "levels", "trees"), 0)
        self._graphs = graphs
        self._proposer: DeviceProposer | None = None  # set when the networks are there
        self.is_warm = True

    @abstractmethod
    def _levels(self) -> Levels:
        """The networks, for a device."""

    @abstractmethod
    def _rooted(self, batch: Batch) -> Sequence[bool]:
        """Whether each entry's tree has a hidden state to grow from."""

    @abstractmethod
    def _reach(
        self, entries: Sequence[Scheduled], rows_G: NDArray[np.int64], ends_G: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Levels that each of their trees can have; their rows are followed from now on."""

    @abstractmethod
    def _grow(self, growth: TreeGrowth, wanted: TreesToGrow) -> None:
        """Level by level, each read when it has run."""

    def propose(
        self, batch: Batch, floor: float, entries: Collection[int] | None = None
    ) -> DraftTrees:
        self.is_warm = True
        rooted_B = self._rooted(batch)
        growing = [
            b
            for b, entry in enumerate(batch.entries)
            if (entries is None or b in entries)
            and entry.samples
            and len(entry.draft_slots)
            and rooted_B[b]
        ]
        if not growing and not self.lockstep:
            return only_roots(len(batch.entries))
        wanted = self._trees_to_grow(batch, growing, floor)
        self._counters["trees"] += len(growing)
        if self._proposer is None:
            trees = self._grown(wanted)
        else:
            proposal = self._proposer.propose(wanted)
            self.is_warm = self._proposer.is_warm
            trees = proposal.trees(wanted.sizes_G, source=0)
            self._counters["levels"] += proposal.num_levels
            self._counters["nodes"] += proposal.num_nodes
        return spread(trees, growing, len(batch.entries))

    def counters(self) -> dict[str, float]:
        """Positions extended; trees grown, levels and nodes run for them. Over its life."""
        return {f"draft/{name}": float(count) for name, count in self._counters.items()}

    def _trees_to_grow(self, batch: Batch, growing: list[int], floor: float) -> TreesToGrow:
        entries = [batch.entries[b] for b in growing]
        rows_G = np.array([entry.request.row for entry in entries], dtype=np.int64)
        ends_G = np.array([entry.end for entry in entries], dtype=np.int64)
        sizes_G = np.array([len(entry.draft_slots) for entry in entries], dtype=np.int64)
        return TreesToGrow(
            batch=batch,
            entries_G=growing,
            rows_G=rows_G,
            ends_G=ends_G,
            sizes_G=np.minimum(sizes_G, self.max_draft_tokens),
            depths_G=np.minimum(sizes_G, self._reach(entries, rows_G, ends_G)),
            floor=floor,
        )

    def _grown(self, wanted: TreesToGrow) -> DraftTrees:
        growth = TreeGrowth(
            wanted.sizes_G,
            wanted.depths_G,
            topk=self._topk,
            max_nodes=self._nodes_per_tree,
            floor=wanted.floor,
        )
        self._grow(growth, wanted)
        return growth.finish(source=0)

    def _device_proposer(self) -> DeviceProposer:
        return DeviceProposer(
            self._levels(),
            self._guesser,
            topk=self._topk,
            num_steps=self._num_steps,
            device=self._device,
            lockstep=self.lockstep,
            graphs=self._graphs,
        )

    def _sent(self, rows: NDArray[np.int64]) -> torch.Tensor:
        return upload({"rows": rows}, self._device)["rows"]
