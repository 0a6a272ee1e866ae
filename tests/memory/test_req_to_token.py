import numpy as np
import pytest

from rollout.errors import IntegrityError
from rollout.memory.req_to_token import ReqToToken


def test_rows_are_handed_out_once():
    rows = ReqToToken(3, 11)
    assert rows.table.shape == (3, 11)
    assert rows.table.dtype == np.int32
    assert [rows.allocate_row() for _ in range(3)] == [0, 1, 2]
    assert rows.available == 0
    with pytest.raises(AssertionError, match="all 3 rows are taken"):
        rows.allocate_row()
    rows.free_row(1)
    assert rows.allocate_row() == 1
    rows.reset()
    assert rows.available == 3


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1], [5]])
def test_integrity_finds_lost_and_doubled_rows(held: list[int]):
    rows = ReqToToken(3, 11)
    row = rows.allocate_row()
    rows.check_integrity([row])
    with pytest.raises(IntegrityError, match="rows"):
        rows.check_integrity(held)


def test_double_free_is_found():
    rows = ReqToToken(3, 11)
    row = rows.allocate_row()
    rows.free_row(row)
    rows.free_row(row)
    with pytest.raises(IntegrityError, match="rows"):
        rows.check_integrity([])
