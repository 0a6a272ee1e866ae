"""How many slots recurrent states and layers with a window have, and what they leave to KV."""

from __future__ import annotations

import pytest
import torch

from rollout import RolloutEngine
from rollout.config import MemoryConfig
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.memory.sizing import slot_bytes_of, state_sizes, window_sizes
from rollout.memory.state_pool import StatePool
from rollout.models.hybrid_config import LinearAttentionSpec
from rollout.models.spec import ModelSpec
from tests.helpers.tiny_families import CONFIGS, save_tiny_family
from tests.helpers.tiny_hybrid import save_tiny_hybrid

BUDGET = 1 << 20
CPU = torch.device("cpu")
STATES = LinearAttentionSpec(
    layers=(0, 1, 3), num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=16, conv_width=4
)
FAMILIES = {"olmo3": "Olmo3ForCausalLM", "mistral window": "MistralForCausalLM"}


def num_states(budget: int, **memory) -> int:
    return state_sizes(MemoryConfig(**memory), 8, slot_bytes=100, budget=budget).num_slots


def spec_of(name: str, max_context_len: int = 512) -> ModelSpec:
    config = CONFIGS[name].to_dict() | {"architectures": [FAMILIES[name]]}
    return ModelSpec.of(config, None, max_context_len)


def windows(spec: ModelSpec, budget: int = BUDGET, max_running: int = 4, **memory):
    return window_sizes(
        MemoryConfig(**memory), spec, torch.float32, max_running=max_running, chunk_len=32,
        budget=budget,
    )  # fmt: skip


def test_states_are_those_needed_and_more_as_far_as_half_the_budget_goes():
    for budget, slots in (
        (10**6, 2 * 9 + 8 * 10),
        (2 * 100 * 60, 60),  # half of it is for states
        (2 * 100 * 17, 18),  # two for each request, and two to score with, there must be
    ):
        assert num_states(budget) == slots
    assert num_states(100, state_slots=77) == 77
    configured = MemoryConfig(state_interval=9)
    assert state_sizes(configured, 8, slot_bytes=100, budget=100).interval == 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_state_slot_are_those_of_the_tensors(dtype):
    pool = StatePool(STATES, num_slots=5, dtype=dtype, device=CPU)
    tensors = pool.convolutions + pool.recurrent
    assert [tuple(t.shape) for t in pool.convolutions] == [(6, 96, 3)] * 3
    assert [tuple(t.shape) for t in pool.recurrent] == [(6, 4, 8, 16)] * 3
    assert {t.dtype for t in pool.convolutions} == {dtype}
    assert {t.dtype for t in pool.recurrent} == {torch.float32}
    each = StatePool.bytes_per_slot(STATES, dtype)
    assert sum(t.numel() * t.itemsize for t in tensors) == 6 * each
    assert pool.release() == 6 * each
    pool.allocate()
    assert not any(t[0].any() for t in tensors)


def test_kv_has_what_states_leave(tmp_path):
    folder = str(save_tiny_hybrid(tmp_path))
    engine = RolloutEngine.from_pretrained(folder, "none", kv_bytes=3 << 20, max_running=4)
    target = engine.worker.target
    each = StatePool.bytes_per_slot(target.model.spec.linear_attention, torch.float32)
    states = target.state_pool.num_slots + 1
    kv = sum(t.numel() * t.itemsize for t in target.kv_pool.keys + target.kv_pool.values)
    assert 0.98 * (3 << 20) < kv + states * each <= (3 << 20) + 2 * kv / target.kv_pool.num_slots
    with pytest.raises(
        OutOfMemoryError, match=r"lower scheduler\.max_running or memory\.state_slots"
    ):
        RolloutEngine.from_pretrained(folder, "none", kv_bytes=1 << 18, state_slots=50)


def test_layers_are_counted_by_what_they_see() -> None:
    # olmo3: two of three layers have a window of 8, and two kv heads of 12 dims.
    assert slot_bytes_of(spec_of("olmo3"), torch.bfloat16) == (96, 192)
    assert slot_bytes_of(spec_of("mistral window"), torch.bfloat16)[0] == 0
    assert slot_bytes_of(spec_of("olmo3", 8), torch.bfloat16) == (288, 0), "it hides nothing"


def test_windows_are_two_of_each_request_as_far_as_the_budget_goes() -> None:
    for budget, slots in (
        (BUDGET, 2 * 4 * (9 + 8) + 32),
        (1 << 16, ((1 << 16) - 384) // (2 * 192 + 384)),
        (1 << 13, None),
    ):
        found = windows(spec_of("olmo3"), budget)
        assert (found and found.num_slots) == slots
    assert windows(spec_of("olmo3", 18)) is None, "it would save little"
    assert windows(spec_of("olmo3"), window_slots=0) is None
    assert windows(spec_of("olmo3"), window_slots=20).num_slots == 20


def test_fewer_slots_than_can_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"memory.window_slots=8.*at least 9"):
        windows(spec_of("olmo3"), window_slots=8)
    for field, value in (("window_slots", -1), ("state_slots", 1), ("state_interval", 0)):
        with pytest.raises(InvalidInputError, match=f"memory.{field}={value}"):
            MemoryConfig(**{field: value})


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pools_fill_the_budget(name, tmp_path) -> None:
    folder = str(save_tiny_family(tmp_path, name))
    options = {"kv_bytes": 1 << 19, "max_running": 4, "dtype": "float32", "num_threads": 1}
    kv, tokens = {}, {}
    for window_slots in (0, None):
        engine = RolloutEngine.from_pretrained(folder, "none", window_slots=window_slots, **options)
        target = engine.worker.target
        assert (target.memory.windows is None) == (window_slots == 0)
        kv[window_slots] = sum(t.nbytes for t in target.kv_pool.keys + target.kv_pool.values)
        tokens[window_slots] = target.memory.slots.num_slots
    assert kv[None] <= (1 << 19) + 2 * kv[None] / tokens[None]
    assert kv[0] > 0.98 * (1 << 19)
    assert tokens[None] > 2 * tokens[0], "more tokens than where every layer stores all"
    assert engine.status().kv_slots == tokens[None]
    if name == "olmo3":
        remedy = r"for windows; fewer need a lower memory\.window"
        with pytest.raises(OutOfMemoryError, match=remedy):
            RolloutEngine.from_pretrained(folder, "none", kv_bytes=1 << 16, window_slots=10_000)
