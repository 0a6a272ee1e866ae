"""vime's training against the server, without a router between."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.vime_trainer import train
from tests.server.conftest import OpenServer
from tests.server.policies import Policy


def test_two_steps(
    open_server: OpenServer, weights_root: Path, tmp_path: Path, first: Policy, second: Policy
) -> None:
    roots = {"weights_root": str(weights_root), "profile_root": str(tmp_path / "profiles")}
    live = open_server({"num_threads": 1}, **roots)
    with live.client() as router:
        train(live, router, tmp_path / "profiles", (second, first))
