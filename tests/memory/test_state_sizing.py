"""How many state slots there are, and what they leave to KV."""

import pytest
import torch

from rollout import RolloutEngine
from rollout.config import MemoryConfig
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.memory.sizing import state_sizes
from rollout.memory.state_pool import StatePool
from rollout.models.hybrid_config import LinearAttentionSpec
from tests.helpers.tiny_hybrid import save_tiny_hybrid

SPEC = LinearAttentionSpec(
    layers=(0, 1, 3), num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, conv_width=4
)


def sizes(budget: int, **memory):
    return state_sizes(MemoryConfig(**memory), 8, slot_bytes=100, budget=budget)


@pytest.mark.parametrize(
    ("budget", "slots"),
    [
        (10**6, 2 * 9 + 8 * 10),
        (2 * 100 * 60, 60),  # half of it is for states
        (2 * 100 * 17, 18),  # two for each request, and two to score with, there must be
    ],
)
def test_the_default_is_what_is_needed_and_more_as_far_as_half_the_budget_goes(budget, slots):
    assert sizes(budget).num_slots == slots


def test_what_is_configured_is_had():
    assert sizes(100, state_slots=77).num_slots == 77
    assert sizes(100, state_interval=9).interval == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_slot_are_those_of_the_tensors(dtype):
    pool = StatePool(SPEC, num_slots=5, dtype=dtype, device=torch.device("cpu"))
    tensors = pool.convolutions + pool.recurrent
    assert [tuple(t.shape) for t in pool.convolutions] == [(6, 96, 3)] * 3
    assert [tuple(t.shape) for t in pool.recurrent] == [(6, 4, 8, 16)] * 3
    assert {t.dtype for t in pool.convolutions} == {dtype}
    assert {t.dtype for t in pool.recurrent} == {torch.float32}
    each = StatePool.bytes_per_slot(SPEC, dtype)
    assert sum(t.numel() * t.itemsize for t in tensors) == 6 * each
    assert pool.release() == 6 * each
    pool.allocate()
    assert not any(t[0].any() for t in tensors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_hybrid(tmp_path_factory.mktemp("hybrid")))


def test_kv_has_what_states_leave(folder):
    engine = RolloutEngine.from_pretrained(folder, "none", kv_bytes=3 << 20, max_running=4)
    target = engine.worker.target
    each = StatePool.bytes_per_slot(target.model.spec.linear_attention, torch.float32)
    states = target.state_pool.num_slots + 1
    kv = sum(t.numel() * t.itemsize for t in target.kv_pool.keys + target.kv_pool.values)
    assert 0.98 * (3 << 20) < kv + states * each <= (3 << 20) + 2 * kv / target.kv_pool.num_slots


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_running": 32}, "for recurrent states; fewer states need a lower scheduler.max_run"),
        ({"state_slots": 50}, "lower scheduler.max_running or memory.state_slots"),
    ],
)
def test_too_few_bytes_name_what_to_change(folder, options, remedy):
    with pytest.raises(OutOfMemoryError, match=remedy.replace(".", r"\.")):
        RolloutEngine.from_pretrained(folder, "none", kv_bytes=1 << 18, **options)


@pytest.mark.parametrize(
    ("field", "value"), [("state_slots", 1), ("state_slots", 0), ("state_interval", 0)]
)
def test_settings_that_cannot_be(field, value):
    with pytest.raises(InvalidInputError, match=f"memory.{field}={value}"):
        MemoryConfig(**{field: value})
