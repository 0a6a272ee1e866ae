import numpy as np
import pytest

from rollout.errors import IntegrityError
from rollout.memory.req_to_token import ReqToToken
from rollout.memory.slots import NULL_SLOT, SlotAllocator


def test_freed_slots_come_back_in_order():
    slots = SlotAllocator(9)
    held = slots.allocate(6)
    slots.free(held[2:5])
    assert slots.allocate(4).tolist() == [3, 4, 5, 7]


def test_integrity_names_what_is_wrong():
    slots = SlotAllocator(6)
    slots.allocate(3)
    slots.check_integrity([np.array([1, 2, 3], dtype=np.int32)])
    for held, problem in (
        ([[1, 2]], "neither free nor held"),
        ([[1, 2, 3], [3]], "two owners"),
        ([[1, 2, 3, 4]], "two owners"),  # 4 is free
        ([[1, 2, 3, NULL_SLOT]], "null slot"),
        ([[1, 2, 3, 7]], "outside"),
        ([[1, 2, 3, -1]], "outside"),
    ):
        with pytest.raises(IntegrityError, match=problem):
            slots.check_integrity(np.array(h, dtype=np.int32) for h in held)
    slots.free(np.array([1], dtype=np.int32))
    slots.free(np.array([1], dtype=np.int32))
    with pytest.raises(IntegrityError, match="freed twice"):
        slots.check_integrity([np.array([2, 3], dtype=np.int32)])


def test_rows_are_handed_out_once():
    rows = ReqToToken(3, 11)
    assert rows.table.shape == (3, 11)
    assert rows.table.dtype == np.int32
    assert [rows.allocate_row() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(AssertionError, match="all 3 rows are taken"):
        rows.allocate_row()
    rows.free_row(1)
    assert rows.allocate_row() == 1
    rows.check_integrity([0, 1, 2])
    rows.free_row(1)
    rows.free_row(2)
    row = 0
    rows.check_integrity([row])
    for held in ([], [0, 0], [0, 1], [5]):
        with pytest.raises(IntegrityError, match="rows"):
            rows.check_integrity(held)
    rows.free_row(row)
    rows.free_row(row)
    with pytest.raises(IntegrityError, match="rows"):
        rows.check_integrity([])
