"""Ranks: processes that run one model."""

from rollout.parallel.model_ranks import (
    ONE_RANK,
    ModelRanks,
    follows,
    host_store,
    is_launched,
    launch_variables,
    local_rank,
    open_ranks,
    rank_of,
)
from rollout.parallel.process_ranks import ProcessRanks
from rollout.parallel.rank_group import RankGroup, SingleRank
from rollout.parallel.rank_leader import RankLeader

__all__ = [
    "ONE_RANK",
    "ModelRanks",
    "ProcessRanks",
    "RankGroup",
    "RankLeader",
    "SingleRank",
    "follows",
    "host_store",
    "is_launched",
    "launch_variables",
    "local_rank",
    "open_ranks",
    "rank_of",
]
