"""One of four processes that are two models of two ranks: ``python -m tests.helpers.model_ranks
out.json``, as `launch` starts it. Writes its rank and whom it meets."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from rollout.config import ParallelConfig, ParallelMode
from rollout.parallel import open_ranks
from tests.helpers.hang import wait_until


def main() -> None:
    config = ParallelConfig(mode=ParallelMode.tensor, size=2)
    group = open_ranks(config, torch.device("cpu")).tensor
    met = group.all_gather_text(os.environ["RANK"])
    output = Path(sys.argv[1])
    output.write_text(json.dumps([group.rank, met]))
    if os.environ["RANK"] == "0":  # it hosts the store of both models, until all have met
        others = [output.with_name(output.name.replace("-0.", f"-{rank}.")) for rank in range(4)]
        wait_until(lambda: all(each.exists() for each in others))


if __name__ == "__main__":
    main()
