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


def main() -> None:
    config = ParallelConfig(mode=ParallelMode.tensor, size=2)
    group = open_ranks(config, torch.device("cpu")).tensor
    met = group.all_gather_text(os.environ["RANK"])
    Path(sys.argv[1]).write_text(json.dumps([group.rank, met]))
    group.all_gather_text("")  # rank 0 hosts the store until all have met


if __name__ == "__main__":
    main()
