"""A proposal of a neural draft on a device: all its levels are launched, then it is read once.

Legend: G trees, P of a shape: those and padding, F rows of a level of a tree, W nodes of a level, N
nodes of all levels, C candidates, K candidates of a row, R rows of logits, D draft vocabulary, E
hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.config import MemoryConfig
from rollout.runner.graphs.capture import CudaCapture
from rollout.runner.graphs.captured_runs import CapturedRuns
from rollout.runner.transfers import download, upload
from rollout.types import Batch
from spec_workers.neural.device_growth import DeviceGrowth, DeviceNodes
from spec_workers.neural.device_guesses import DeviceGuessed, DeviceGuesser, noise_inputs
from spec_workers.neural.guesses import Guesser
from spec_workers.neural.read_proposal import ReadProposal
from spec_workers.target import TargetWorker

Tensors = dict[str, torch.Tensor]

_FIRST_LONGEST = 1024
_LONGEST_STEP = 4


class Shape(NamedTuple):
    """The shape of a proposal: all that its launches depend on beside what they read."""

    trees: int  # padded
    levels: int  # 1: children of the roots alone
    longest: int  # no draft has read more positions
    truncates: bool


class Levels(Protocol):
    """The draft's networks, level by level."""

    def inputs(self, rows_G: NDArray[np.int64], padding: int) -> dict[str, NDArray]:
        """The arrays that launches read beside ``rows``, of fixed shapes, for trees of these rows
        of ``req_to_token``, which were followed, and padding."""
        ...

    def longest(self, rows_G: NDArray[np.int64]) -> int:
        """Positions that any of them attends to."""
        ...

    def changes(self, rows_G: NDArray[np.int64]) -> dict[str, NDArray]:
        """The changes to the tables on the device."""
        ...

    def apply(self, tensors: Tensors, rows_G: NDArray[np.int64]) -> None:
        """Tell them: ``tensors`` has the changes of these rows."""
        ...

    def roots(self, inputs: Tensors) -> torch.Tensor:
        """Hidden states [P, 1, E] that the trees grow from."""
        ...

    def run(
        self,
        level: int,
        nodes: DeviceNodes,
        before_PFE: torch.Tensor,
        inputs: Tensors,
        longest: int,
    ) -> torch.Tensor:
        """Hidden states [P, F, E], the last W those of the level's nodes.

        ``level``: 1 for children of the roots. ``before_PFE``: of the level before. ``longest``:
        no draft has read more positions.
        """
        ...

    def logits(self, level: int, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, D] of the level's nodes; level 0: of the roots."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TreesToGrow:
    """The trees to grow, on the host."""

    batch: Batch
    entries_G: list[int]  # of the batch
    rows_G: NDArray[np.int64]  # of req_to_token
    ends_G: NDArray[np.int64]  # tokens of their sequences
    sizes_G: NDArray[np.int64]  # see TreeGrowth
    depths_G: NDArray[np.int64]
    floor: float


class DeviceProposer:
    """Grows trees as `TreeGrowth` does, by the guesses of a `Guesser`."""

    def __init__(
        self,
        levels: Levels,
        guesser: Guesser,
        *,
        topk: int,
        num_steps: int,
        device: torch.device,
        lockstep: bool,
        graphs: CapturedRuns | None = None,
    ) -> None:
        """
        Args:
            lockstep: launch every level, whatever there is to grow.
            graphs: capture proposals, all levels of one together; default: each is launched anew.
        """
        self._levels = levels
        self._guesser = guesser
        self._topk = topk
        self._num_steps = num_steps
        self._device = device
        self._lockstep = lockstep
        self._graphs = graphs
        self._shapes: set[Shape] = set()  # that were proposed
        self.is_warm = True  # the last proposal compiled nothing, and was not captured
        self._device_guesser = DeviceGuesser(topk, guesser.token_ids_D, device)

    @torch.inference_mode()
    def propose(self, wanted: TreesToGrow) -> ReadProposal:
        """The grown trees. One copy to the device, one from it, and nothing else waits."""
        shape = self._shape(wanted)
        self.is_warm = shape in self._shapes
        self._shapes.add(shape)
        arrays = self._inputs(wanted, shape.trees - len(wanted.rows_G))
        arrays |= self._levels.changes(wanted.rows_G)
        placed = None if self._graphs is None else self._graphs.place(arrays)
        tensors = upload(arrays, self._device) if placed is None else placed
        self._levels.apply(tensors, wanted.rows_G)
        if self._graphs is None or placed is None:
            grown = self._grow(tensors, shape)
            # Kernel by kernel, which is not how its like will run.
            self.is_warm &= self._graphs is None or self._graphs.is_idle
        else:
            grown = self._graphs.run(shape, partial(self._grow, tensors, shape))
            self.is_warm &= self._graphs.is_warm
        count = len(wanted.rows_G)
        read = download({name: tensor[:count] for name, tensor in grown.items()})
        found: dict[str, Any] = read
        proposal = ReadProposal(
            batch=wanted.batch,
            entries_G=wanted.entries_G,
            guesser=self._guesser,
            topk=self._topk,
            **found,
        )
        self._guesser.remember(proposal)
        return proposal

    def _shape(self, wanted: TreesToGrow) -> Shape:
        entries = [wanted.batch.entries[b] for b in wanted.entries_G]
        deepest = int(wanted.depths_G.max(initial=1))
        longest = _FIRST_LONGEST
        while longest < self._levels.longest(wanted.rows_G):
            longest *= _LONGEST_STEP
        return Shape(
            trees=padded_count(len(entries)),
            levels=self._num_steps if self._lockstep else deepest,
            longest=longest,
            truncates=any(entry.request.params.truncates for entry in entries),
        )

    def _inputs(self, wanted: TreesToGrow, padding: int) -> dict[str, NDArray]:
        requests = [wanted.batch.entries[b].request for b in wanted.entries_G]
        least = float(np.finfo(np.float32).tiny)
        arrays: dict[str, NDArray] = {
            "rows": np.pad(wanted.rows_G, (0, padding)),
            "sizes": np.pad(wanted.sizes_G, (0, padding)),
            "depths": np.pad(wanted.depths_G, (0, padding)),
            "floor": np.array([max(wanted.floor, least)], dtype=np.float32),
        }
        arrays |= noise_inputs(requests, wanted.ends_G, padding)
        return arrays | self._guesser.tables() | self._levels.inputs(wanted.rows_G, padding)

    def _grow(self, inputs: Tensors, shape: Shape) -> Tensors:
        """The tensors that `ReadProposal` reads, of all P trees. Nothing waits."""
        topk, levels = self._topk, self._levels
        growth = DeviceGrowth(inputs["sizes"], inputs["depths"], inputs["floor"], topk)
        hidden_PFE = levels.roots(inputs)
        guessed = [self._guess(growth, 0, hidden_PFE, inputs)]
        for level in range(1, shape.levels):
            nodes = growth.expand()
            hidden_PFE = levels.run(level, nodes, hidden_PFE, inputs, shape.longest)
            guessed.append(self._guess(growth, level, hidden_PFE[:, -topk:], inputs))

        def by_tree(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([part.view(shape.trees, -1, part.shape[1]) for part in parts], dim=1)

        return {
            "tokens_GC": growth.tokens_GC.int(),
            "probs_GC": growth.probs_GC,
            "candidates_GN": growth.candidates_GN.int(),
            "index_GRK": by_tree([each.index_RC for each in guessed]).int(),
            "probs_GRK": by_tree([each.probs_RC for each in guessed]),
            "ends_GRK": by_tree([each.ends_RC for each in guessed]),
        }

    def _guess(
        self, growth: DeviceGrowth, depth: int, hidden_PFE: torch.Tensor, inputs: Tensors
    ) -> DeviceGuessed:
        logits_RD = self._levels.logits(depth, hidden_PFE.flatten(0, 1))
        guessed = self._device_guesser.children(logits_RD, inputs, depth)
        shape = (*hidden_PFE.shape[:2], -1)
        growth.add(guessed.tokens_RW.view(shape), guessed.estimates_RW.view(shape))
        return guessed


def padded_count(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is as large."""
    power = 1 << max(0, count - 1).bit_length()
    return power // 4 * 3 if power >= 4 and count <= power // 4 * 3 else power


def proposal_graphs(config: MemoryConfig, target: TargetWorker) -> CapturedRuns | None:
    """None where nothing is to be captured. The target's graphs have what they need of the bound,
    drafts what that leaves. When memory is given back theirs go too."""
    device = target.model.device
    if device.type != "cuda" or not config.graph_bytes or target.ranks.all.size > 1:
        return None
    forwards = None if target.graphs is None else target.graphs.runs
    graphs = CapturedRuns(
        "proposals",
        max_bytes=lambda: config.graph_bytes - (0 if forwards is None else forwards.num_bytes),
        capture=CudaCapture(device),
        device=device,
    )
    target.residency.add_graphs(graphs)
    return graphs
