"""Draft-extend: what the target computed in a step, as rows that a chain of runners can run.

Row i of runner k joins token i + k + 1 to a hidden state of position i: for runner 0 the target's,
for others what runner k - 1 gave there. So runner k ends k positions before the last known token,
and goes on where it ended: at a position whose row of runner k - 1 is in general one of those
stored in `DraftState`.

Legend: B entries, T rows, K tokens a row depends on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.ops.ragged import offsets_of
from spec_workers.draft_tree import indices_within
from spec_workers.neural.draft_runner import KnownRuns
from spec_workers.step.observation import Observation, runs_prompt


class DraftExtension:
    """The runs of the first runner, then of the next.

    ``runs``: every computed position whose next token is known: committed tokens, then the accepted
    nodes; of finished requests too, since the prefix cache keeps them. ``sources_T``: the index of
    each row's hidden state among the rows of the runner before, and behind those the stored states
    of the B entries; for the first runner, among the rows of the target's forward.
    """

    def __init__(self, step: Observation, num_runners: int, *, prompts_alone: bool) -> None:
        """``prompts_alone``: only of entries that run a prompt."""
        following: list[int] = []
        query_rows: list[int] = []
        lens: list[int] = []
        first_rows = step.forwarded.offsets_B1.tolist()
        for b, (entry, result) in enumerate(zip(step.batch.entries, step.results, strict=True)):
            if prompts_alone and not runs_prompt(entry):
                lens.append(0)
                continue
            tokens = entry.request.tokens[entry.start + 1 : entry.end + 1] + result.token_ids
            following += tokens
            # Without a token behind it, as where the logits were broken, the root is not run.
            run_len = min(entry.run_len, len(tokens))
            query_rows += range(first_rows[b], first_rows[b] + run_len)
            query_rows += [first_rows[b] + entry.run_len - 1 + node for node in result.path]
            lens.append(run_len + len(result.path))
        entries = step.batch.entries
        self.runs = KnownRuns(
            rows_B=np.array([entry.request.row for entry in entries], dtype=np.int64),
            starts_B=np.array([entry.start for entry in entries], dtype=np.int64),
            lens_B=np.array(lens, dtype=np.int64),
            next_TK=np.array(following, dtype=np.int32)[:, None],
            tokens_B=[entry.request.tokens for entry in entries],
        )
        self.sources_T: NDArray[np.int64] = np.array(query_rows, dtype=np.int64)
        self._runner = 0
        if num_runners > 1:
            self._lay_out_tails(step, num_runners)

    def _lay_out_tails(self, step: Observation, num_runners: int) -> None:
        """Tokens at [from, known), as far as a later runner may ask for them, one entry behind the
        other."""
        self._from_B = np.maximum(self.runs.starts_B - (num_runners - 1), 0)
        tails = [
            entry.request.tokens[begin : entry.end + num_runners] + result.token_ids
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
        """The position behind each run."""
        return self.runs.starts_B + self.runs.lens_B

    def advance(self, before_B: NDArray[np.int64], own_B: NDArray[np.int64]) -> None:
        """Move on to the next runner's rows.

        Args:
            before_B: last position stored of the runner that was current, -1 for none.
            own_B: last position stored of the runner that becomes it, -1 for none.
        """
        previous, runner = self.runs, self._runner + 1
        behind_B = previous.starts_B - 1
        carries_B = (before_B == behind_B) & (own_B != behind_B) & (behind_B >= 0)
        starts_B = previous.starts_B - carries_B
        ends_B = np.minimum(self.ends_B, self._known_B - 1 - runner)
        lens_B = np.maximum(ends_B - starts_B, 0)
        entries_T = np.repeat(np.arange(len(lens_B)), lens_B)
        positions_T = starts_B[entries_T] + indices_within(lens_B)
        first_T = self._tail_offsets_B[entries_T] + positions_T - self._from_B[entries_T] + 1
        offsets_B1 = offsets_of(previous.lens_B)
        within_T = positions_T - previous.starts_B[entries_T]
        self.sources_T = np.where(
            within_T < 0, offsets_B1[-1] + entries_T, offsets_B1[:-1][entries_T] + within_T
        )
        self.runs = KnownRuns(
            rows_B=previous.rows_B,
            starts_B=starts_B,
            lens_B=lens_B,
            next_TK=self._tails[first_T[:, None] + np.arange(runner + 1)],
            tokens_B=previous.tokens_B,
        )
        self._runner = runner
