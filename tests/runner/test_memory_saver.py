"""Sleep and wake: memory given back and taken again, and nothing else changed by it."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.models.layers.linear import Linear
from rollout.runner.memory_regions import MemoryRegions
from tests.helpers.compared import outcome
from tests.helpers.replaying import ReplayingCapture, plain_factory
from tests.helpers.tiny_draft import save_tiny_eagle3

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=24, seed=3, n=2, ignore_eos=True)
ALL = ("weights", "kv_cache", "graphs")


@pytest.fixture
def engine(tiny_model_path):
    engine = RolloutEngine.from_pretrained(
        tiny_model_path, max_running=4, spec_options={"calibration_seconds": 0}
    )
    yield engine
    if not engine.released_tags:
        engine.check_integrity()
        assert engine.worker.memory.usage.used == 0


def generated(engine):
    return outcome(engine.generate(PROMPTS, PARAMS))


def weights_of(part):
    return [
        (name, loader.read()) for name, loader in part.weight_loaders().items() if loader.required
    ]


def plain_storages(engine):
    """Bytes of every plain tensor of the target and of its KV."""
    target = engine.worker.target
    tensors = [*target.model._plain_weights(), *target.kv_pool.keys]
    return {tensor.untyped_storage().nbytes() for tensor in tensors}


def test_what_sleeps_is_gone_and_wakes_as_it_was(engine):
    digest, before, version = engine.weights_digest(), generated(engine), engine.weight_version
    target = engine.worker.target
    kv_bytes = sum(t.nbytes for t in target.kv_pool.keys + target.kv_pool.values)
    weight_bytes = sum(t.nbytes for _, t in weights_of(target.model))
    graphs = target.graphs.graph_runner
    for tags in (ALL, ("weights",), ("kv_cache",)):
        held = graphs.num_bytes
        freed = engine.release_memory(tags)
        assert list(freed) == list(tags)
        assert freed.get("graphs", held) == held > 0
        assert freed.get("kv_cache", kv_bytes) == kv_bytes
        assert freed.get("weights", weight_bytes) >= weight_bytes, "packed weights are padded"
        assert graphs.num_bytes == 0
        assert tags is not ALL or plain_storages(engine) == {0}
        assert target.model.vocabulary.head.is_packed == ("weights" not in tags)
        assert engine.released_tags == set(tags)
        engine.resume_memory()
        assert not engine.released_tags
        assert 0 not in plain_storages(engine)
        assert engine.weights_digest() == digest
        assert generated(engine) == before
    assert engine.weight_version == version
    assert target.model.vocabulary.head.is_packed


def test_requests_in_flight_wait_and_go_on(engine):
    requests = [engine.submit(p, PARAMS, prompt_index=i) for i, p in enumerate(PROMPTS)]
    for _ in range(4):  # with no rollout known beforehand, drafts do not end them that soon
        engine.step()
    assert engine.scheduler.num_running == 3
    engine.release_memory()
    assert engine.scheduler.num_running == 0
    assert engine.worker.memory.usage.used == engine.worker.memory.usage.cached == 0
    with pytest.raises(EngineStateError, match=r"resume_memory\(\['weights', 'kv_cache'\]\)"):
        engine.step()
    engine.resume_memory()
    ended = {}
    while engine.has_unfinished:
        ended |= {r.request_id: (r.token_ids, r.logprobs) for r in engine.step()}
    assert [ended[request.request_id] for request in requests] == generated(engine)[::2]


def test_running_requests_keep_their_kv_while_the_weights_alone_are_gone(engine):
    expected = generated(engine)[0]
    engine.submit(PROMPTS[0], PARAMS)
    engine.step()
    engine.release_memory(["weights"])
    assert engine.scheduler.num_running == 1
    engine.resume_memory(["weights"])
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    assert outcome(ended) == [expected]


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_nothing_runs_while_a_part_is_released(engine, tag):
    digest, before = engine.weights_digest(), generated(engine)
    new = weights_of(engine.worker.target.model)
    engine.release_memory([tag])
    assert not engine.can_run
    assert tag in engine.unavailable_reason
    calls = [
        lambda: engine.generate(PROMPTS, PARAMS),
        lambda: list(engine.stream(PROMPTS, PARAMS)),
        lambda: engine.score(PROMPTS[0], [3, 4]),
        lambda: engine.release_memory([tag]),
        lambda: engine.release_memory(),
    ]
    if tag == "weights":
        calls += [
            lambda: engine.update_weights_from_tensor(new),
            lambda: engine.begin_weight_update(),
            lambda: engine.weights_digest(),
            lambda: engine.get_weights_by_name("model.norm.weight"),
        ]
    for call in calls:
        with pytest.raises(EngineStateError, match=rf"resume_memory\(\['{tag}'\]\)"):
            call()
    assert engine.released_tags == {tag}
    assert not engine.has_unfinished
    engine.resume_memory([tag])
    assert (engine.weights_digest(), generated(engine)) == (digest, before)


def test_bad_tags_and_bad_order_do_nothing(engine):
    before = generated(engine)
    with pytest.raises(InvalidInputError, match="weights, kv_cache, graphs"):
        engine.release_memory(["kv_cache", "wheels"])
    with pytest.raises(InvalidInputError, match="must be a list"):
        engine.release_memory("weights")
    with pytest.raises(EngineStateError, match="kv_cache is not released"):
        engine.resume_memory(["kv_cache"])
    assert engine.release_memory([]) == {}
    engine.begin_weight_update()
    with pytest.raises(WeightUpdateError, match="under way"):
        engine.release_memory()
    assert engine.release_memory(["kv_cache"])["kv_cache"] > 0
    engine.abandon_weight_update()
    with pytest.raises(EngineStateError, match="weights is not released"):
        engine.resume_memory(["kv_cache", "weights"])
    assert engine.released_tags == {"kv_cache"}
    engine.resume_memory()
    assert generated(engine) == before
    engine.release_memory(["graphs"])  # they would be captured again: it runs without
    assert generated(engine) == before


def test_weights_released_without_a_copy_need_a_full_update(engine):
    before, digest = generated(engine), engine.weights_digest()
    whole = weights_of(engine.worker.target.model)
    engine.release_memory(keep_weights=False)
    engine.resume_memory()
    assert not engine.can_run
    assert "released without a copy" in engine.unavailable_reason
    with pytest.raises(WeightUpdateError, match="released without a copy"):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(WeightUpdateError, match="released without a copy"):
        engine.update_weights_from_tensor(whole[:3], partial=True)
    with pytest.raises(InvalidInputError, match="missing"):
        engine.update_weights_from_tensor(whole[:3])
    engine.release_memory()  # torn weights may sleep too, and stay torn
    engine.resume_memory()
    assert "released without a copy" in engine.unavailable_reason
    engine.update_weights_from_tensor(whole)
    assert (engine.weights_digest(), generated(engine)) == (digest, before)


def test_weights_may_be_updated_before_the_kv_cache_is_back(engine, tiny_model_path):
    generator = torch.Generator().manual_seed(4)
    new = [
        (name, torch.randn(values.shape, generator=generator) * 0.2)
        for name, values in weights_of(engine.worker.target.model)
    ]
    other = RolloutEngine.from_pretrained(tiny_model_path, "none")
    other.update_weights_from_tensor(new)
    generated(engine)
    engine.release_memory()
    engine.resume_memory(["weights"])
    engine.update_weights_from_tensor(new, weight_version=7)
    engine.flush_cache()
    assert "kv_cache" in engine.unavailable_reason
    engine.resume_memory(["kv_cache"])
    assert engine.weights_digest() == other.weights_digest()
    assert generated(engine) == generated(other)
    assert engine.weight_version == 7


class PausingSaver:
    """Stands for torch-memory-saver: every tensor that was made in a region holds NaN once its tag
    is paused."""

    def __init__(self) -> None:
        self.made: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.paused: set[str] = set()

    @contextmanager
    def region(self, tag):
        with Made(self.made[tag]):
            yield

    def pause(self, tag):
        self.paused.add(tag)
        for tensor in self.made[tag]:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 127)

    def resume(self, tag):
        self.paused.remove(tag)


class Made(TorchDispatchMode):
    """Keeps the tensors that are made."""

    def __init__(self, found: list[torch.Tensor]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default):
            self._found.append(result)
        return result


@pytest.mark.parametrize("drafts", [False, True])
def test_graphs_survive_where_addresses_are_preserved(
    tiny_model_path, tmp_path, monkeypatch, drafts
):
    saver, capture = PausingSaver(), ReplayingCapture()
    monkeypatch.setattr(MemoryRegions, "on", lambda device: MemoryRegions(saver))
    monkeypatch.setattr(Linear, "pack", lambda linear: None)  # plain, as on a GPU
    if drafts:
        eagle = {"draft_path": str(save_tiny_eagle3(tmp_path, tiny_model_path)), "frozen": True}
        eagle |= {"budget": "fixed", "calibration_seconds": 0}
        engine = RolloutEngine.from_pretrained(
            tiny_model_path, "eagle", spec_options=eagle, max_running=4
        )
    else:
        config = engine_config(tiny_model_path, {"max_running": 4})
        engine = RolloutEngine.from_config(config, plain_factory(capture))
    assert {tag.split()[-1] for tag in saver.made} == {"weights", "kv_cache"}
    graphs, before = engine.worker.target.graphs, generated(engine)
    whole, captured = weights_of(engine.worker.target.model), len(capture.captures)
    for keep in (True, False):
        engine.release_memory(keep_weights=keep)
        assert saver.paused == set(saver.made)
        engine.resume_memory()
        assert not saver.paused
        if not keep:
            engine.update_weights_from_tensor(whole)
        assert generated(engine) == before
    if not drafts:
        assert len(capture.captures) == captured == graphs.graph_runner.num_graphs > 0
        engine.release_memory(ALL)
        assert graphs.graph_runner.num_graphs == 0
        engine.resume_memory()
        assert generated(engine) == before
    engine.check_integrity()
