"""One of four processes that run models together: ``python -m tests.helpers.rank_counts out.json``.

As `launch` starts it, with the cases in RANK_COUNTS, those of more ranks first. A case of fewer
ranks is run by the first ones. Writes what each case gave, None where this rank had no part in it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from rollout import RolloutEngine
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.tensor_cases import PROMPTS, SAMPLED, numbers

RANK = int(os.environ.get("RANK", "0"))


@dataclass(frozen=True)
class RankCase:
    """A model on a number of ranks."""

    size: int
    target: str
    spec: str
    spec_options: dict[str, Any]
    options: dict[str, Any]

    def open(self) -> RolloutEngine:
        mode = {"mode": "tensor", "size": self.size, "timeout": HANG_SECONDS}
        parallel = mode if self.size > 1 else {}
        return RolloutEngine.from_pretrained(
            self.target, self.spec, spec_options=self.spec_options, parallel=parallel,
            **self.options,
        )  # fmt: skip


def run(case: RankCase) -> dict[str, Any]:
    engine = case.open()
    rollouts = numbers(engine.generate(PROMPTS, SAMPLED))
    scored = [engine.score(*rollout[:2], SAMPLED) for rollout in rollouts[:3]]
    engine.check_integrity()
    metrics = engine.metrics()
    return {
        "rollouts": rollouts, "scored": scored,
        "drafted": metrics.drafted, "accepted": metrics.accepted,
        "preemptions": metrics.preemptions, "hits": engine.worker.memory.counters.hit,
    }  # fmt: skip


def main(output: Path) -> None:
    torch.set_num_threads(1)
    store = next(iter(rendezvous("env://")))  # its host hosts it as long as this
    results = []
    for case in (RankCase(**each) for each in json.loads(os.environ["RANK_COUNTS"])):
        os.environ["WORLD_SIZE"] = str(case.size)
        results.append(run(case) if case.size > RANK else None)
    output.write_text(json.dumps(results))
    del store


if __name__ == "__main__":
    main(Path(sys.argv[1]))
