"""The hidden states that a chain's steps go on from, and its trees' nodes as rows, level by level.

Legend: B requests, Q rows of ``req_to_token``, K steps of the chain, F nodes of a level, N nodes of
all levels, T rows of a step, E hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.types import Request
from spec_workers.neural.device_growth import DeviceNodes
from spec_workers.neural.draft_runner import DraftRunner
from spec_workers.neural.eagle_drafter import gathered
from spec_workers.neural.level_plans import LevelPlans
from spec_workers.neural.tree_growth import Expansion


class ChainState:
    """The last known row of each running request and step: its position and hidden state.

    Step k knows one position less than step k - 1: its row there waits for one token more. When
    that comes it takes the hidden state kept here, and until then the trees grow from it. Kept by
    row of ``req_to_token``, so there are never more than requests may run.
    """

    def __init__(self, rows: int, num_steps: int, hidden_size: int, like: torch.Tensor) -> None:
        """``like``: a tensor whose dtype and device the hidden states have."""
        self._hidden_KQE = like.new_zeros((num_steps, rows, hidden_size))
        self._last_QK = np.full((rows, num_steps), -1, dtype=np.int64)
        self._requests_Q = np.full(rows, -1, dtype=np.int64)

    def last(self, requests: Sequence[Request]) -> NDArray[np.int64]:
        """[B, K]: the position of each last row, -1 where there is none."""
        rows_B, ids_B = _rows_and_ids(requests)
        return np.where((self._requests_Q[rows_B] == ids_B)[:, None], self._last_QK[rows_B], -1)

    def hidden(self, step: int, rows_B: torch.Tensor) -> torch.Tensor:
        """[B, E], as a copy; of rows without a last position it means nothing. int64 rows, where
        the hidden states are."""
        return self._hidden_KQE[step, rows_B]

    def begin(self, requests: Sequence[Request]) -> None:
        """Rows that are these requests' from now on; what others left there is forgotten."""
        rows_B, ids_B = _rows_and_ids(requests)
        self._last_QK[rows_B[self._requests_Q[rows_B] != ids_B]] = -1
        self._requests_Q[rows_B] = ids_B

    def keep(
        self,
        step: int,
        rows_B: NDArray[np.int64],
        positions_B: NDArray[np.int64],
        at_B: torch.Tensor,
        hidden_BE: torch.Tensor,
    ) -> None:
        """``at_B``: the rows, where the hidden states are."""
        self._last_QK[rows_B, step] = positions_B
        self._hidden_KQE[step].index_copy_(0, at_B, hidden_BE)

    def forget(self) -> None:
        self._requests_Q[:] = -1

    def forget_request(self, request: Request) -> None:
        self._requests_Q[self._requests_Q == request.request_id] = -1


def _rows_and_ids(requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return (
        np.array([request.row for request in requests], dtype=np.int64),
        np.array([request.request_id for request in requests], dtype=np.int64),
    )


@dataclass(kw_only=True, slots=True)
class NodeLevel:
    """The rows of one step: nodes of a tree side by side, parents first, trees ascending."""

    trees_T: NDArray[np.int64]
    tokens_T: NDArray[np.int64]
    depths_T: NDArray[np.int64]
    sources_T: NDArray[np.int64]  # parents' rows in the step before; roots stand behind, by tree
    new_rows_F: NDArray[np.int64]  # the rows of the expansion's nodes, in its order


class ChainNodes:
    """Call `run` with each expansion of a `TreeGrowth`, in turn."""

    def __init__(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        self._trees_N = none
        self._tokens_N = none
        self._depths_N = none
        self._parents_N = none  # -1: the root
        self._rows_N = none  # in the last step
        self._num_rows = 0  # of the last step
        self._level = 0  # first node of the last expansion

    def run(self, expansion: Expansion) -> NodeLevel:
        first = len(self._trees_N)
        above_F = self._level + expansion.parent_rows_F
        parents_F = np.where(expansion.depths_F == 1, -1, above_F)
        self._trees_N = np.concatenate([self._trees_N, expansion.trees_F])
        self._tokens_N = np.concatenate([self._tokens_N, expansion.tokens_F])
        self._depths_N = np.concatenate([self._depths_N, expansion.depths_F])
        self._parents_N = np.concatenate([self._parents_N, parents_F])
        self._level = first

        # A tree that did not grow has no children to be told of.
        grown_N = np.flatnonzero(np.isin(self._trees_N, expansion.trees_B))
        nodes_T = grown_N[np.argsort(self._trees_N[grown_N], kind="stable")]
        parents_T, trees_T = self._parents_N[nodes_T], self._trees_N[nodes_T]
        rows_N = np.append(self._rows_N, np.full(len(parents_F) + 1, -1))  # the last one's a root's
        sources_T = np.where(parents_T < 0, self._num_rows + trees_T, rows_N[parents_T])
        self._rows_N = np.full(len(self._trees_N), -1, dtype=np.int64)
        self._rows_N[nodes_T] = np.arange(len(nodes_T))
        self._num_rows = len(nodes_T)
        return NodeLevel(
            trees_T=trees_T,
            tokens_T=self._tokens_N[nodes_T],
            depths_T=self._depths_N[nodes_T],
            sources_T=sources_T,
            new_rows_F=self._rows_N[first:],
        )


Tensors = dict[str, torch.Tensor]


class ChainLevels:
    """See `Levels`."""

    def __init__(self, runners: Sequence[DraftRunner], state: ChainState, *, topk: int) -> None:
        self._runners = runners
        self._state = state
        self._topk = topk
        self._plans = [
            LevelPlans(runner, topk=topk, num_steps=len(runners), name=f"step_{step}_")
            for step, runner in enumerate(runners)
        ]

    def inputs(self, rows_G: NDArray[np.int64], padding: int) -> dict[str, NDArray]:
        arrays: dict[str, NDArray] = {}
        for plans in self._plans[1:]:
            arrays |= plans.inputs(rows_G, padding)
        return arrays

    def longest(self, rows_G: NDArray[np.int64]) -> int:
        return max((plans.longest(rows_G) for plans in self._plans[1:]), default=0)

    def changes(self, rows_G: NDArray[np.int64]) -> dict[str, NDArray]:
        arrays: dict[str, NDArray] = {}
        for plans in self._plans[1:]:
            arrays |= plans.changes(rows_G)
        return arrays

    def apply(self, tensors: Tensors, rows_G: NDArray[np.int64]) -> None:
        for plans in self._plans[1:]:
            plans.apply(tensors, rows_G)

    def roots(self, inputs: Tensors) -> torch.Tensor:
        return self._state.hidden(0, inputs["rows"])[:, None]

    def run(
        self,
        level: int,
        nodes: DeviceNodes,
        before_GME: torch.Tensor,
        inputs: Tensors,
        longest: int,
    ) -> torch.Tensor:
        plans, runner = self._plans[level], self._runners[level]
        root_G1E = self._state.hidden(level - 1, inputs["rows"])[:, None]
        above_GE = root_G1E if level == 1 else torch.cat([root_G1E, before_GME], dim=1)
        hidden_GNE = gathered(above_GE, nodes.parents_GN + 1)
        # A node of depth d is at d - 1 positions behind the step's last known one.
        nodes_N = torch.arange(level * self._topk, device=hidden_GNE.device)
        hidden_TE = runner.forward(
            nodes.tokens_GN.flatten(),
            hidden_GNE.flatten(0, 1),
            plans.positions(inputs["ends"] - 1 - level, nodes_N // self._topk).flatten(),
            plans.slots(level, inputs).flatten().long(),
            plans.plan(level, nodes, inputs, longest, new_levels=level),
        )
        return hidden_TE.view(hidden_GNE.shape)

    def logits(self, level: int, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._runners[level].logits(hidden_RE)
