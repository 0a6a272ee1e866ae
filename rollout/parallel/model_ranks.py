"""Over whom the weights of one model are spread."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.parallel.rank_group import RankGroup, SingleRank


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRanks:
    """At most one of the two is of more than one rank.

    ``tensor``: every rank runs the same rows; heads, MLP features and the vocabulary are split.
    ``rows``: every rank runs rows of its own, in lockstep; MLPs are split by output features and
    compute the rows of all, everything else each rank has whole.
    """

    tensor: RankGroup
    rows: RankGroup

    @property
    def of_drafts(self) -> ModelRanks:
        """Those of a draft, which tensor-parallel ranks have whole: it is small, and every rank
        computes the same."""
        return ModelRanks(tensor=SingleRank(), rows=self.rows)

    @property
    def all(self) -> RankGroup:
        """Whoever makes the same calls."""
        return self.rows if self.rows.size > 1 else self.tensor

    def close(self, reason: str = "the group is closed") -> None:
        self.tensor.close(reason)
        self.rows.close(reason)


ONE_RANK = ModelRanks(tensor=SingleRank(), rows=SingleRank())
