"""Ranks that cannot meet: the store's port is another program's."""

from __future__ import annotations

import socket

import pytest
import torch

from rollout.config import ParallelConfig, ParallelMode
from rollout.errors import ParallelError
from rollout.parallel import open_ranks, time_limit


@pytest.mark.parametrize(
    ("rank", "why"), [(0, "address already in use"), (1, "no answer in")], ids=["host", "other"]
)
def test_a_taken_port_is_an_error_of_every_rank_in_time(rank, why, monkeypatch):
    monkeypatch.setattr(time_limit, "ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it accepts, and never answers
        port = taken.getsockname()[1]
        variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        config = ParallelConfig(mode=ParallelMode.tensor, size=2, timeout=0.5)
        with pytest.raises(ParallelError, match=rf"rank {rank} of 2: .*127\.0\.0\.1:{port}.*{why}"):
            open_ranks(config, torch.device("cpu"))
