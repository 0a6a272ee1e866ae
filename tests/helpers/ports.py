"""Ports for processes that listen later, perhaps only when they have imported torch."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port below those that the system hands out by itself, so that no other process is given it
    meanwhile."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
