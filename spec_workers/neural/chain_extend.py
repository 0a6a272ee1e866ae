"""Draft-extend of a chain: the rows each step can run when a step of the target is done.

Row i of step k joins token i + k + 1 to what step k - 1 gave at position i. So step k ends k
positions before the last known token, and goes on where it ended: at a position whose row of step
k - 1 is in general one of those kept in `ChainState`.

Legend: B entries, T rows, K tokens a row depends on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spec_workers.draft_tree import offsets_of, places_within
from spec_workers.neural.draft_extend import Extension
from spec_workers.neural.draft_runner import KnownRuns
from spec_workers.observation import Observation


class ChainExtension:
    """The runs of one step of the chain, then of the next.

    ``sources_T``: where each row's hidden state is: a row of the step before, for the first step
    of the target's forward; behind the T' rows of the step before stand the kept ones of the B
    entries.
    """

    def __init__(self, step: Observation, num_steps: int, *, prompts_alone: bool = False) -> None:
        """``num_steps``: of the chain, the first included. ``prompts_alone``: see `Extension`."""
        extension = Extension.of(step, prompts_alone=prompts_alone)
        self.runs: KnownRuns = extension.runs
        self.sources_T: NDArray[np.int64] = extension.query_rows_T
        self._depth = 0
        # Tokens at [from, known), as far as a step may ask for them, one entry behind the other.
        starts_B = extension.runs.starts_B
        self._from_B = np.maximum(starts_B - (num_steps - 1), 0)
        tails = [
            entry.request.tokens[begin : entry.end + num_steps] + result.token_ids
            for entry, result, begin in zip(
                step.batch.entries, step.results, self._from_B.tolist(), strict=True
            )
        ]
        lens_B = np.array([len(tail) for tail in tails], dtype=np.int64)
        self._known_B = self._from_B + lens_B
        self._tails = np.array([token for tail in tails for token in tail], dtype=np.int32)
        self._tail_offsets_B = offsets_of(lens_B)[:-1]

    @property
    def ends_B(self) -> NDArray[np.int64]:
        return self.runs.starts_B + self.runs.lens_B

    def advance(self, before_B: NDArray[np.int64], own_B: NDArray[np.int64]) -> None:
        """To the next step.

        Args:
            before_B: position of the row kept of the step that was current, -1 for none.
            own_B: likewise of the step that becomes it.
        """
        previous, depth = self.runs, self._depth + 1
        behind_B = previous.starts_B - 1
        carries_B = (before_B == behind_B) & (own_B != behind_B) & (behind_B >= 0)
        starts_B = previous.starts_B - carries_B
        ends_B = np.minimum(self.ends_B, self._known_B - 1 - depth)
        lens_B = np.maximum(ends_B - starts_B, 0)
        entries_T = np.repeat(np.arange(len(lens_B)), lens_B)
        positions_T = starts_B[entries_T] + places_within(lens_B)
        first_T = self._tail_offsets_B[entries_T] + positions_T - self._from_B[entries_T] + 1
        offsets_B1 = offsets_of(previous.lens_B)
        place_T = positions_T - previous.starts_B[entries_T]
        self.sources_T = np.where(
            place_T < 0, offsets_B1[-1] + entries_T, offsets_B1[:-1][entries_T] + place_T
        )
        self.runs = KnownRuns(
            rows_B=previous.rows_B,
            starts_B=starts_B,
            lens_B=lens_B,
            next_TK=self._tails[first_T[:, None] + np.arange(depth + 1)],
            tokens_B=previous.tokens_B,
        )
        self._depth = depth
