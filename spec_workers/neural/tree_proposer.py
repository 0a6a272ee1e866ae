"""A proposal of a neural draft: trees grow level by level, and are read when all is launched.

Legend: G trees, P of a shape: those and padding, F rows of a level of a tree, W nodes of a level, N
nodes of all levels, C candidates, R rows of logits, E hidden.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops.transfers import download, upload
from rollout.ops.tree_growth import TreeGrowth
from rollout.runner.graphs.graph_runner import GraphRunner
from rollout.types import Batch
from spec_workers.neural.draft_levels import DraftLevels
from spec_workers.neural.guesses import Guesser, Tensors, noise_inputs
from spec_workers.neural.level_pace import LevelPace
from spec_workers.neural.proposal import Proposal


class Shape(NamedTuple):
    """The shape of a proposal: all that its calls depend on beside what they read."""

    trees: int  # padded, for a device
    levels: int  # 1: children of the roots alone
    threads: int  # that calls captured on a CPU hold; 0 on a device


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
    token_ms_G: NDArray[np.float64] | None = None  # that an accepted token saves; None: not asked


class TreeProposer:
    """Grows trees through the draft's levels, by the guesses of a `Guesser`."""

    def __init__(
        self,
        levels: DraftLevels,
        guesser: Guesser,
        *,
        topk: int,
        num_steps: int,
        device: torch.device,
        on_host: bool,
        lockstep: bool,
        graphs: GraphRunner | None = None,
        max_trees: int = sys.maxsize,
    ) -> None:
        """
        Args:
            on_host: run only actual nodes, as of the levels.
            lockstep: run every level, whatever there is to grow.
            graphs: capture proposals, all levels of one together; default: each is launched anew.
            max_trees: of a proposal that is captured.
        """
        self._levels = levels
        self._guesser = guesser
        self._topk = topk
        self._num_steps = num_steps
        self._device = device
        self._on_host = on_host
        self._lockstep = lockstep
        self._graphs = graphs
        self._max_trees = max_trees
        self._pace = LevelPace()
        self._shapes: set[Shape] = set()  # that were proposed
        self.is_warm = True  # the last proposal compiled nothing, and was not captured

    @torch.inference_mode()
    def propose(self, wanted: TreesToGrow) -> Proposal:
        """The grown trees. With a device: one copy to it, one from it, and nothing else waits."""
        count = len(wanted.rows_G)
        shape = self._shape(wanted, count if self._on_host else padded_count(count))
        inputs = self._inputs(wanted, shape)
        self.is_warm = self._on_host or shape in self._shapes
        self._shapes.add(shape)
        inputs |= self._levels.changes(wanted.rows_G)
        sent = None
        if self._graphs is not None and count <= self._max_trees:
            sent = self._graphs.send(inputs)
        tensors = upload(inputs, self._device) if sent is None else sent
        self._levels.apply(tensors, wanted.rows_G)
        if self._graphs is None or sent is None:
            grown = self._grow(tensors, shape, wanted.token_ms_G)
            # It was launched kernel by kernel, and later ones of this shape will be replayed.
            self.is_warm &= self._graphs is None or self._graphs.is_idle
        else:
            grown = self._graphs.run(shape, partial(self._grow, tensors, shape))
            self.is_warm &= self._graphs.is_warm
        read = download({name: tensor[:count] for name, tensor in grown.items()})
        return Proposal(batch=wanted.batch, entries_G=wanted.entries_G, topk=self._topk, **read)

    def _shape(self, wanted: TreesToGrow, trees: int) -> Shape:
        levels = self._num_steps if self._lockstep else int(wanted.depths_G.max(initial=1))
        return Shape(trees, levels, torch.get_num_threads() if self._on_host else 0)

    def _inputs(self, wanted: TreesToGrow, shape: Shape) -> dict[str, NDArray]:
        padding = shape.trees - len(wanted.rows_G)
        requests = [wanted.batch.entries[b].request for b in wanted.entries_G]
        least = float(np.finfo(np.float32).tiny)
        arrays: dict[str, NDArray] = {
            "rows": padded(wanted.rows_G, padding),
            "ends": padded(wanted.ends_G, padding),
            "sizes": padded(wanted.sizes_G, padding),
            "depths": padded(wanted.depths_G, padding),
            "floor": np.array([max(wanted.floor, least)], dtype=np.float32),
            "ratios": self._guesser.ratios(),
        }
        arrays |= noise_inputs(requests, wanted.ends_G, padding, self._num_steps)
        return arrays | self._levels.inputs(wanted.rows_G, padding)

    def _grow(
        self, inputs: Tensors, shape: Shape, token_ms_G: NDArray[np.float64] | None = None
    ) -> Tensors:
        """The tensors that `Proposal` reads, of all P trees. Nothing waits for a device.

        ``token_ms_G``: of `TreesToGrow`; on the host, levels that do not pay are left out.
        """
        topk, levels, sizes_P = self._topk, self._levels, inputs["sizes"]
        growth = TreeGrowth(sizes_P, inputs["depths"], inputs["floor"], topk, shape.levels)
        above_PHE = levels.roots(inputs)
        self._guess(growth, 0, above_PHE, sizes_P[:, None] >= 0, inputs)
        for level in range(1, shape.levels):
            if token_ms_G is not None:
                self._pace.observe(level - 1, growth)
            nodes = growth.expand()
            is_row_PW = nodes.is_node_GN[:, -topk:]
            if self._on_host and not self._lockstep and not is_row_PW.any():
                break
            if token_ms_G is not None and not self._pace.pays(level, growth, token_ms_G):
                break
            with self._pace.timed(shape.trees, levels.is_warm):
                hidden_PWE, above_PHE = levels.run(level, nodes, above_PHE, inputs)
                self._guess(growth, level, hidden_PWE, is_row_PW, inputs)
        return growth.results()

    def _guess(
        self,
        growth: TreeGrowth,
        level: int,
        hidden_PFE: torch.Tensor,
        is_row_PF: torch.Tensor,
        inputs: Tensors,
    ) -> None:
        """Add the children of a level's rows to the trees; on the host, of actual rows alone."""
        trees_PF = torch.arange(len(is_row_PF), device=is_row_PF.device)[:, None]
        trees_PF = trees_PF.expand(is_row_PF.shape)
        if not self._on_host or bool(is_row_PF.all()):
            logits_RD = self._levels.logits(level, hidden_PFE.flatten(0, 1))
            found = self._guesser.children(logits_RD, inputs, trees_PF.flatten(), level)
            tokens_PFW, probs_PFW = (each.unflatten(0, is_row_PF.shape) for each in found)
        else:
            logits_RD = self._levels.logits(level, hidden_PFE[is_row_PF])
            found = self._guesser.children(logits_RD, inputs, trees_PF[is_row_PF], level)
            tokens_PFW, probs_PFW = (
                each.new_zeros(*is_row_PF.shape, each.shape[1]) for each in found
            )
            tokens_PFW[is_row_PF], probs_PFW[is_row_PF] = found
        growth.add(tokens_PFW, probs_PFW)


def padded(array: NDArray, padding: int) -> NDArray:
    """The array with zeros behind it."""
    return np.pad(array, (0, padding)) if padding else array


def padded_count(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least ``count``."""
    power = 1 << max(0, count - 1).bit_length()
    return power // 4 * 3 if power >= 4 and count <= power // 4 * 3 else power
