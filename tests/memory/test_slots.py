import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import IntegrityError
from rollout.memory.req_to_token import ReqToToken
from rollout.memory.slots import NULL_SLOT, SlotAllocator


def test_freed_slots_come_back_in_order():
    slots = SlotAllocator(9)
    held = slots.allocate(6)
    slots.free(held[2:5])
    assert slots.allocate(4).tolist() == [3, 4, 5, 7]


def test_what_is_not_there_is_neither_handed_out_nor_freed():
    slots = SlotAllocator(4)
    with pytest.raises(AssertionError, match="5 slots wanted, 4 free"):
        slots.allocate(5)
    assert slots.available == 4
    with pytest.raises(AssertionError, match="more slots freed"):
        slots.free(np.array([1], dtype=np.int32))


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
    assert rows.available == 0
    with pytest.raises(AssertionError, match="all 3 rows are taken"):
        rows.allocate_row()
    rows.free_row(1)
    assert rows.allocate_row() == 1
    rows.reset()
    assert rows.available == 3
    row = rows.allocate_row()
    rows.check_integrity([row])
    for held in ([], [0, 0], [0, 1], [5]):
        with pytest.raises(IntegrityError, match="rows"):
            rows.check_integrity(held)
    rows.free_row(row)
    rows.free_row(row)
    with pytest.raises(IntegrityError, match="rows"):
        rows.check_integrity([])


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_against_sets(num_slots: int, operations: list[tuple[bool, int]]):
    slots = SlotAllocator(num_slots)
    held: list[np.ndarray] = []
    for allocates, number in operations:
        if allocates:
            taken = slots.allocate(min(number, slots.available))
            assert taken.dtype == np.int32
            before = {slot for array in held for slot in array.tolist()}
            assert not before & set(taken.tolist())
            held.append(taken)
        elif held:
            slots.free(held.pop(number % len(held)))
        assert slots.available == num_slots - sum(map(len, held))
        slots.check_integrity(held)
    slots.reset()
    slots.check_integrity([])
    assert slots.allocate(num_slots).tolist() == list(range(1, num_slots + 1))
