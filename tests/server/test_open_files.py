"""The limit of open files is raised as far as it may be, and never lowered."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator

import pytest

from rollout.server.command import allow_open_files

KIND = resource.RLIMIT_NOFILE


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = resource.getrlimit(KIND)
    yield
    resource.setrlimit(KIND, before)


def test_it_is_raised_and_not_lowered() -> None:
    allowed, most = resource.getrlimit(KIND)
    resource.setrlimit(KIND, (allowed - 100, most))
    allow_open_files(allowed - 50)
    assert resource.getrlimit(KIND) == (allowed - 50, most)
    allow_open_files(10)
    assert resource.getrlimit(KIND) == (allowed - 50, most)


def test_more_than_there_may_be_is_said(caplog: pytest.LogCaptureFixture) -> None:
    most = resource.getrlimit(KIND)[1]
    if most == resource.RLIM_INFINITY:
        pytest.skip("any number may be open")
    with caplog.at_level(logging.WARNING):
        allow_open_files(most + 1)
    assert resource.getrlimit(KIND) == (most, most)
    assert "server.max_connections" in caplog.text
