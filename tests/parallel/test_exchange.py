"""Exchanges between ranks: shared memory has gloo's bits, and says which rank did not come."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.helpers.launch import launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("tests.helpers.exchange_ranks", tmp_path_factory.mktemp("ranks"), ranks=3)


def test_shared_memory_and_gloo_give_what_was_sent(ranks: list[dict[str, Any]]) -> None:
    assert [rank["differing"] for rank in ranks] == [[], [], []]


def test_no_exchange_gives_the_numbers_of_another(ranks: list[dict[str, Any]]) -> None:
    assert [rank["mixed up"] for rank in ranks] == [0, 0, 0]


@pytest.mark.parametrize("case", ["other hosts", "not allowed"])
def test_where_one_rank_cannot_share_memory_all_use_gloo(
    ranks: list[dict[str, Any]], case: str
) -> None:
    assert [rank[case] for rank in ranks] == [["GroupExchange", [0, 1, 2]]] * 3


def test_a_rank_that_hangs_is_named_within_the_timeout(ranks: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        reason = f"rank {rank} of 3: rank 2 did not come in 3 seconds; end all ranks and start"
        assert [error.startswith(reason) for error in ranks[rank]["late"]] == [True, True]


@pytest.mark.parametrize(("case", "why"), [("left", ": it had enough"), ("ended", "")])
def test_a_rank_that_is_gone_is_named_at_once(
    ranks: list[dict[str, Any]], case: str, why: str
) -> None:
    reason = f"rank 0 of 3: rank 1 has ended or left{why}; end all ranks and start them again"
    assert ranks[0][case] == [reason, reason]
