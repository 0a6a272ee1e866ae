"""How many slots layers with a window have, and what they leave to the others."""

import pytest
import torch

from rollout import RolloutEngine
from rollout.config import MemoryConfig
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.memory.sizing import num_kv_slots, slot_bytes_of, window_sizes
from rollout.models.spec import ModelSpec
from tests.helpers.tiny_families import CONFIGS, save_tiny_family

BUDGET = 1 << 20


def spec_of(name: str, max_context_len: int = 512) -> ModelSpec:
    architecture = {"olmo3": "Olmo3ForCausalLM", "mistral window": "MistralForCausalLM"}[name]
    config = CONFIGS[name].to_dict() | {"architectures": [architecture]}
    return ModelSpec.of(config, None, max_context_len)


def sizes(spec: ModelSpec, budget: int = BUDGET, max_running: int = 4, **memory):
    return window_sizes(
        MemoryConfig(**memory), spec, torch.float32, max_running=max_running, chunk_len=32,
        budget=budget,
    )  # fmt: skip


def test_layers_are_counted_by_what_they_see() -> None:
    # olmo3: two of three layers have a window of 8, and two kv heads of 12 dims.
    assert slot_bytes_of(spec_of("olmo3"), torch.bfloat16) == (96, 192)
    assert slot_bytes_of(spec_of("mistral window"), torch.bfloat16)[0] == 0
    assert slot_bytes_of(spec_of("olmo3", 8), torch.bfloat16) == (288, 0), "it hides nothing"


@pytest.mark.parametrize(
    ("budget", "slots"),
    [
        (BUDGET, 2 * 4 * (9 + 8) + 32),
        (1 << 16, ((1 << 16) - 384) // (2 * 192 + 384)),
        (1 << 13, None),
    ],
)
def test_the_default_is_two_windows_of_each_request_as_far_as_the_budget_goes(budget, slots):
    found = sizes(spec_of("olmo3"), budget)
    assert (found and found.num_slots) == slots


def test_there_is_no_pool_where_it_would_save_little() -> None:
    assert sizes(spec_of("olmo3", 18)) is None
    assert sizes(spec_of("olmo3"), window_slots=0) is None
    assert sizes(spec_of("olmo3"), window_slots=20).num_slots == 20


def test_fewer_slots_than_a_request_holds_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"memory.window_slots=8.*at least 9"):
        sizes(spec_of("olmo3"), window_slots=8)
    with pytest.raises(InvalidInputError, match=r"memory.window_slots=-1"):
        MemoryConfig(window_slots=-1)


@pytest.mark.parametrize("name", ["olmo3", "mistral window"])
def test_the_pools_fill_the_budget(name, tmp_path) -> None:
    folder = save_tiny_family(tmp_path, name)
    options = {"kv_bytes": 1 << 19, "max_running": 4, "dtype": "float32", "num_threads": 1}
    kv, tokens = {}, {}
    for window_slots in (0, None):
        engine = RolloutEngine.from_pretrained(
            str(folder), "none", window_slots=window_slots, **options
        )
        target = engine.worker.target
        assert (target.memory.windows is None) == (window_slots == 0)
        pools = target.kv_pool.keys + target.kv_pool.values
        kv[window_slots] = sum(pool.nbytes for pool in pools)
        tokens[window_slots] = target.memory.slots.num_slots
    assert kv[None] <= (1 << 19) + 2 * kv[None] / tokens[None]
    assert kv[0] > 0.98 * (1 << 19)
    assert tokens[None] > 2 * tokens[0], "more tokens than where every layer stores all"
    assert engine.status().kv_slots == tokens[None]


@pytest.mark.parametrize("budget", [1 << 16, (1 << 16) + 1000, 1 << 19])
def test_a_model_of_windows_alone_starts_where_the_budget_limits_its_pool(budget) -> None:
    spec = spec_of("mistral window")
    windows = sizes(spec, budget, max_running=256)
    assert windows is not None
    _, windowed = slot_bytes_of(spec, torch.float32)
    assert budget - windowed < windowed * (windows.num_slots + 1) <= budget
    config, device = MemoryConfig(max_kv_tokens=9999), torch.device("cpu")
    found = num_kv_slots(config, spec, torch.float32, device, budget, windows=windows)
    assert found == 9999
    with pytest.raises(OutOfMemoryError):
        num_kv_slots(config, spec, torch.float32, device, budget - 999, windows=windows)


def test_what_windows_take_is_named_where_nothing_is_left(tmp_path) -> None:
    folder = save_tiny_family(tmp_path, "olmo3")
    with pytest.raises(OutOfMemoryError, match=r"for windows; fewer need a lower memory\.window"):
        RolloutEngine.from_pretrained(str(folder), "none", kv_bytes=1 << 16, window_slots=10_000)
