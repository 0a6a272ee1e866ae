"""Settings that must be alike on all ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rollout.errors import ParallelError
from rollout.parallel.rank_group import RankGroup


def check_alike(group: RankGroup, settings: Mapping[str, object]) -> None:
    """Raise ParallelError, on every rank, naming the first of the settings that another rank has
    otherwise than rank 0."""
    texts = group.all_gather_text(json.dumps(settings, default=str))
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        other = json.loads(text)
        for name in first | other:
            if first.get(name) != other.get(name):
                raise ParallelError(
                    f"{name} is {other.get(name)!r} on rank {rank} and {first.get(name)!r} on rank "
                    "0: start all ranks alike"
                )
