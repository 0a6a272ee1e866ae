import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import IntegrityError
from rollout.memory.slots import NULL_SLOT, SlotAllocator


def test_fresh_slots_are_contiguous_and_skip_null():
    slots = SlotAllocator(7)
    assert slots.allocate(3).tolist() == [1, 2, 3]
    assert slots.allocate(4).tolist() == [4, 5, 6, 7]
    assert slots.available == 0


def test_freed_slots_come_back_in_order():
    slots = SlotAllocator(9)
    held = slots.allocate(6)
    slots.free(held[2:5])
    assert slots.allocate(4).tolist() == [3, 4, 5, 7]


def test_more_than_available_is_refused_and_takes_nothing():
    slots = SlotAllocator(4)
    with pytest.raises(AssertionError, match="5 slots wanted, 4 free"):
        slots.allocate(5)
    assert slots.available == 4


def test_freeing_more_than_there_are_is_refused():
    slots = SlotAllocator(4)
    with pytest.raises(AssertionError, match="more slots freed"):
        slots.free(np.array([1], dtype=np.int32))


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ([[1, 2]], "neither free nor held"),
        ([[1, 2, 3], [3]], "two owners"),
        ([[1, 2, 3, 4]], "two owners"),  # 4 is free
        ([[1, 2, 3, NULL_SLOT]], "null slot"),
        ([[1, 2, 3, 99]], "outside"),
        ([[1, 2, 3, -1]], "outside"),
    ],
)
def test_integrity_names_what_is_wrong(held: list[list[int]], problem: str):
    slots = SlotAllocator(6)
    slots.allocate(3)
    slots.check_integrity([np.array([1, 2, 3], dtype=np.int32)])
    with pytest.raises(IntegrityError, match=problem):
        slots.check_integrity(np.array(h, dtype=np.int32) for h in held)


def test_double_free_is_found():
    slots = SlotAllocator(6)
    held = slots.allocate(4)
    slots.free(held[:2])
    slots.free(held[:2])
    with pytest.raises(IntegrityError, match="freed twice"):
        slots.check_integrity([held[2:]])


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
