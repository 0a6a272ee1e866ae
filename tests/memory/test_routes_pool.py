import numpy as np
import pytest
import torch

from rollout.memory.routes_pool import RoutesPool, StepRoutes
from rollout.models.experts_config import ExpertsSpec


def pool_of(num_experts=8, slots=6):
    spec = ExpertsSpec(layers=(0, 2), num_experts=num_experts, experts_per_token=3, ffn_size=4)
    return RoutesPool(spec, slots), RoutesPool.bytes_per_slot(spec)


def choices(*slots, layer):
    return torch.tensor([[10 * layer + slot, 1, 2] for slot in slots], dtype=torch.int32)


def step(*slots):
    routes = StepRoutes()
    for layer in range(2):
        routes.record(layer, choices(*slots, layer=layer))
    return np.array(slots), routes.joined()


@pytest.mark.parametrize(("num_experts", "kind"), [(256, np.uint8), (257, np.int16)])
def test_the_smallest_integers_that_number_all_experts(num_experts, kind):
    pool, num_bytes = pool_of(num_experts)
    pool.put(*step(3))
    assert pool.read(np.array([3])).dtype == kind
    assert num_bytes == 6 * np.dtype(kind).itemsize


def test_each_slot_has_what_was_written_last():
    pool, _ = pool_of()
    slots, routes = step(1, 5)
    pool.put(slots, routes)
    routes.fill_(99)  # the next forward may write there
    pool.put(*step(2, 4))
    pool.put(*step(5))
    read = pool.read(np.array([5, 4, 2, 1]))
    assert read.shape == (4, 2, 3)
    assert read[:, 1, 0].tolist() == [15, 14, 12, 11]
    read[:] = 0
    assert pool.read(np.array([5]))[0].tolist() == [[5, 1, 2], [15, 1, 2]]


def test_no_rows_and_no_slots():
    pool, _ = pool_of()
    routes = StepRoutes()
    for layer in range(2):
        routes.record(layer, torch.empty(0, 3, dtype=torch.int32))
    pool.put(np.empty(0, dtype=np.int64), routes.joined())
    assert pool.read(np.empty(0, dtype=np.int32)).shape == (0, 2, 3)


def test_memory_is_given_back_and_had_again():
    pool, num_bytes = pool_of()
    pool.put(*step(1))
    assert pool.release() == 7 * num_bytes
    pool.allocate()
    pool.put(*step(3))
    assert pool.read(np.array([3, 1]))[:, 0, 0].tolist() == [3, 0]
