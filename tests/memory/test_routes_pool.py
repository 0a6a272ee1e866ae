import numpy as np
import torch

from rollout.memory.routes_pool import RoutesPool, StepRoutes
from rollout.models.experts_config import ExpertsSpec


def pool_of(num_experts=8, slots=6):
    spec = ExpertsSpec(layers=(0, 2), num_experts=num_experts, experts_per_token=3, ffn_size=4)
    return RoutesPool(spec, slots), RoutesPool.bytes_per_slot(spec)


def step(*slots):
    routes = StepRoutes()
    for layer in range(2):
        choices = [[10 * layer + slot, 1, 2] for slot in slots]
        routes.record(layer, torch.tensor(choices, dtype=torch.int32).view(-1, 3))
    return np.array(slots), routes.joined()


def test_the_smallest_integers_that_number_all_experts():
    for num_experts, kind in ((256, np.uint8), (257, np.int16)):
        pool, num_bytes = pool_of(num_experts)
        pool.put(*step(3))
        assert pool.read(np.array([3])).dtype == kind
        assert num_bytes == 6 * np.dtype(kind).itemsize
        assert pool.release() == 7 * num_bytes
        pool.allocate()
        assert not pool.read(np.array([3])).any()


def test_each_slot_has_what_was_written_last():
    pool, _ = pool_of()
    slots, routes = step(1, 5)
    pool.put(slots, routes)
    routes.fill_(99)  # the next forward may write there
    pool.put(*step(2, 4))
    pool.put(*step(5))
    pool.put(np.empty(0, dtype=np.int64), step()[1])
    read = pool.read(np.array([5, 4, 2, 1]))
    assert read.shape == (4, 2, 3)
    assert read[:, 1, 0].tolist() == [15, 14, 12, 11]
    read[:] = 0
    assert pool.read(np.array([5]))[0].tolist() == [[5, 1, 2], [15, 1, 2]]
    assert pool.read(np.empty(0, dtype=np.int32)).shape == (0, 2, 3)
