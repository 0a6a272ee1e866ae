"""Sleep and wake: memory given back and taken again, and nothing else changed by it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.engine.engine_loop import EngineLoop
from rollout.errors import EngineStateError, InvalidInputError, WeightUpdateError
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.loader import MODEL_CLASSES, load_model
from rollout.models.spec import ModelSpec
from tests.helpers.compared import outcome
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.in_fork import in_fork
from tests.helpers.tiny_model import save_tiny_llama

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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The temporary folder, where copies of weights are put."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def generated(engine):
    return outcome(engine.generate(PROMPTS, PARAMS))


def weights_of(part):
    return [
        (name, loader.read()) for name, loader in part.weight_loaders().items() if loader.required
    ]


def plain_storages(engine):
    """Bytes of every plain tensor of the target and of its KV."""
    target = engine.worker.target
    tensors = [*target.model._plain_weights(), *target.runner._kv_pool.keys]
    return {tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_tokens_and_weights_after_waking_are_those_before(tiny_model_path, spec, folder):
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec, max_running=4)
    digest, before = engine.weights_digest(), generated(engine)
    version = engine.weight_version
    graphs = engine.worker.target.graphs.graph_runner
    for tags in (ALL, ("weights",), ("kv_cache",)):
        held = graphs.num_bytes
        freed = engine.release_memory(tags)
        assert list(freed) == list(tags)
        assert all(freed.values())
        assert freed.get("graphs", held) == held
        assert graphs.num_bytes == 0
        assert engine.released_tags == set(tags)
        engine.resume_memory()
        assert not engine.released_tags
        assert not list(folder.iterdir())
        assert engine.weights_digest() == digest
        assert generated(engine) == before
    assert engine.weight_version == version
    assert engine.worker.target.model.vocabulary.head.is_packed


def test_a_fork_that_ends_leaves_the_kept_weights(engine, folder):
    """It runs its parent's finalizers when it exits."""
    digest = engine.weights_digest()
    engine.release_memory(["weights"])
    (kept,) = folder.iterdir()
    assert in_fork(engine.worker.memory_saver._backup._remove) == 0
    assert list(kept.iterdir())
    engine.resume_memory()
    assert not kept.exists()
    assert engine.weights_digest() == digest


def test_memory_is_gone_while_released(engine):
    pool = engine.worker.target.runner._kv_pool
    kv_bytes = sum(t.nbytes for t in pool.keys + pool.values)
    weight_bytes = sum(t.nbytes for _, t in weights_of(engine.worker.target.model))
    released = engine.release_memory()
    assert released["kv_cache"] == kv_bytes
    assert released["weights"] >= weight_bytes, "packed weights are padded"
    assert plain_storages(engine) == {0}
    assert not engine.worker.target.model.vocabulary.head.is_packed
    engine.resume_memory()
    assert 0 not in plain_storages(engine)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_every_tensor_of_a_model_is_freed_and_comes_back(tmp_path, architecture, tied, packing):
    path = save_tiny_llama(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": [architecture], "tie_word_embeddings": tied}
    (path / "config.json").write_text(json.dumps(config))
    weights = WeightFactory(dtype=torch.float32, device=torch.device("cpu"), packing=packing)
    model = MODEL_CLASSES[architecture](ModelSpec.read(path, None), weights)
    generator = torch.Generator().manual_seed(1)
    for loader in model.weight_loaders().values():
        if loader.required:
            loader.write(torch.randn(loader.shape, generator=generator))
    model.finish_loading()
    saved = weights_of(model)
    held = sum(values.nbytes for _, values in saved)
    copied = saved[0][1].nbytes if tied and packing and model.vocabulary.head.is_packed else 0
    addresses = [id(tensor) for tensor in model._plain_weights()]
    released = model.release()
    # A packed head is a copy of its table, and packed weights are padded.
    assert released >= held + copied if packing else released == held
    assert model.release() == 0
    model.allocate()
    weight_loaders = model.weight_loaders()
    for name, values in saved:
        weight_loaders[name].write(values)
    model.finish_loading()
    model.allocate()  # has all it needs
    assert [id(tensor) for tensor in model._plain_weights()] == addresses
    for (name, values), (_, found) in zip(saved, weights_of(model), strict=True):
        assert torch.equal(values, found), name


def test_requests_in_flight_wait_and_go_on(engine):
    requests = [engine.submit(p, PARAMS, prompt_index=i) for i, p in enumerate(PROMPTS)]
    for _ in range(4):  # with no rollout known beforehand, drafts do not end them that soon
        engine.step()
    assert engine.scheduler.num_running == 3
    engine.release_memory()
    assert engine.scheduler.num_running == 0
    assert engine.worker.memory.usage.used == engine.worker.memory.usage.cached == 0
    engine.check_integrity()
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
    assert [(r.token_ids, r.logprobs) for r in ended] == [expected]


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_nothing_runs_while_a_part_is_released(engine, tag):
    before = generated(engine)
    engine.release_memory([tag])
    assert not engine.can_run
    assert tag in engine.unavailable_reason
    for call in (
        lambda: engine.generate(PROMPTS, PARAMS),
        lambda: list(engine.stream(PROMPTS, PARAMS)),
        lambda: engine.score(PROMPTS[0], [3, 4]),
        lambda: engine.release_memory([tag]),
        lambda: engine.release_memory(),
    ):
        with pytest.raises(EngineStateError, match=rf"resume_memory\(\['{tag}'\]\)"):
            call()
    assert engine.released_tags == {tag}
    assert not engine.has_unfinished
    engine.resume_memory([tag])
    assert generated(engine) == before


def test_released_weights_cannot_be_read_or_written(engine):
    digest, before = engine.weights_digest(), generated(engine)
    new = weights_of(engine.worker.target.model)
    engine.release_memory(["weights"])
    for call in (
        lambda: engine.update_weights_from_tensor(new),
        lambda: engine.begin_weight_update(),
        lambda: engine.weights_digest(),
        lambda: engine.get_weights_by_name("model.norm.weight"),
    ):
        with pytest.raises(EngineStateError, match=r"resume_memory\(\['weights'\]\)"):
            call()
    engine.resume_memory()
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


def test_weights_released_without_a_copy_need_a_full_update(engine, folder):
    before, digest = generated(engine), engine.weights_digest()
    whole = weights_of(engine.worker.target.model)
    engine.release_memory(keep_weights=False)
    assert not list(folder.iterdir())
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


@pytest.mark.parametrize("keep", [False, True])
def test_weights_may_be_updated_before_the_kv_cache_is_back(engine, tiny_model_path, keep):
    generator = torch.Generator().manual_seed(4)
    new = [
        (name, torch.randn(values.shape, generator=generator) * 0.2)
        for name, values in weights_of(engine.worker.target.model)
    ]
    other = RolloutEngine.from_pretrained(tiny_model_path, "none")
    other.update_weights_from_tensor(new)
    generated(engine)
    engine.release_memory(keep_weights=keep)
    engine.resume_memory(["weights"])
    engine.begin_weight_update(weight_version=7)
    for start in range(0, len(new), 5):
        engine.update_weights_from_tensor(new[start : start + 5])
    engine.end_weight_update()
    engine.flush_cache()
    assert "kv_cache" in engine.unavailable_reason
    engine.resume_memory(["kv_cache"])
    assert engine.weights_digest() == other.weights_digest()
    assert generated(engine) == generated(other)
    assert engine.weight_version == 7


@pytest.fixture
def two_models(engine, tmp_path):
    """The engine with a second model among its worker's: what a draft's weights will be."""
    path = save_tiny_llama(tmp_path / "draft", hidden_size=24, num_layers=1, seed=9)
    draft = load_model(path, engine.config.model.dtype, torch.device("cpu"))

    class Draft:
        """Its tensors have names of their own, all but the head, which is the target's."""

        def weight_loaders(self):
            own = draft.weight_loaders()
            shared = engine.worker.target.model.weight_loaders()["lm_head.weight"]
            del own["lm_head.weight"]
            return {f"draft.{name}": d for name, d in own.items()} | {"lm_head.weight": shared}

        def finish_loading(self):
            draft.finish_loading()

        def release(self):
            return draft.release() + engine.worker.target.model.vocabulary.head.release()

        def allocate(self):
            draft.allocate()
            engine.worker.target.model.vocabulary.head.allocate()

    engine.worker.weights.parts.add("draft", Draft())
    return engine


def test_draft_weights_sleep_and_wake_with_the_targets(two_models, engine):
    weights = engine.worker.weights
    before, digests = generated(engine), [weights.digest(part) for part in ("target", "draft")]
    alone = sum(values.nbytes for _, values in weights_of(weights.parts["target"]))
    assert engine.release_memory()["weights"] > alone
    engine.resume_memory()
    assert [weights.digest(part) for part in ("target", "draft")] == digests
    assert generated(engine) == before
    whole = [pair for part in weights.parts.values() for pair in weights_of(part)]
    engine.release_memory(keep_weights=False)
    engine.resume_memory()
    assert "draft, target" in engine.unavailable_reason
    with pytest.raises(WeightUpdateError, match="without a copy"):
        engine.update_weights_from_tensor(weights_of(weights.parts["draft"]), selector="draft")
    engine.update_weights_from_tensor(dict(whole).items())
    assert [weights.digest(part) for part in ("target", "draft")] == digests
    assert generated(engine) == before


def test_where_no_copy_can_be_made_nothing_is_released(engine, folder, monkeypatch):
    before = generated(engine)
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    with pytest.raises(FileNotFoundError):
        engine.release_memory()
    assert not engine.released_tags
    assert generated(engine) == before


def test_a_copy_that_is_damaged_leaves_the_engine_torn_until_a_full_update(engine, folder):
    before, whole = generated(engine), weights_of(engine.worker.target.model)
    engine.release_memory()
    (path,) = folder.glob("*/*.safetensors")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid|header"):
        engine.resume_memory()
    assert not list(folder.iterdir())
    assert engine.released_tags == {"kv_cache"}
    engine.resume_memory()
    assert "could not be brought back" in engine.unavailable_reason
    engine.update_weights_from_tensor(whole)
    assert generated(engine) == before


def test_large_weights_are_copied_in_files_of_bounded_size(engine, folder, monkeypatch):
    monkeypatch.setattr("rollout.runner.memory_saver._FILE_BYTES", 40_000)
    digest = engine.weights_digest()
    engine.release_memory()
    files = list(folder.glob("*/*.safetensors"))
    assert len(files) > 2
    assert max(file.stat().st_size for file in files) < 45_000
    engine.resume_memory()
    assert engine.weights_digest() == digest


def test_the_corpus_survives(engine, tmp_path):
    generated(engine)
    engine.save_corpus(tmp_path / "corpus")
    before = engine.worker.counters()["corpus/live_tokens"]
    assert before > 0
    engine.release_memory()
    assert engine.worker.counters()["corpus/live_tokens"] == before
    engine.worker._calibration_seconds = 0.05
    engine.load_corpus(tmp_path / "corpus")  # times no forwards now
    engine.resume_memory()
    assert engine.worker.counters()["corpus/live_tokens"] == before


def test_a_loop_waits_while_its_engine_sleeps(engine):
    with EngineLoop(engine) as loop:
        expected = loop.submit(PROMPTS[0], PARAMS).future.result(HANG_SECONDS).token_ids
        tickets = [loop.submit(PROMPTS[0], PARAMS) for _ in range(3)]
        loop.call(lambda e: e.release_memory()).result(HANG_SECONDS)
        late = loop.submit(PROMPTS[0], PARAMS)
        assert loop.call(lambda e: e.can_run).result(HANG_SECONDS) is False
        assert not late.future.done()
        loop.call(lambda e: e.resume_memory()).result(HANG_SECONDS)
        for ticket in [*tickets, late]:
            assert ticket.future.result(HANG_SECONDS).token_ids == expected


MEASURE = """
import json, sys
import psutil
from rollout import RolloutEngine, SamplingParams

def resident():
    return psutil.Process().memory_info().rss

def touch():
    engine.flush_cache()
    pool = engine.worker.target.runner._kv_pool
    for tensor in pool.keys + pool.values:
        tensor.fill_(1)

engine = RolloutEngine.from_pretrained(sys.argv[1], kv_bytes=64 << 20, max_running=4)
params = SamplingParams(max_new_tokens=16, ignore_eos=True, n=2)
found = []
for _ in range(2):
    tokens = [r.token_ids for r in engine.generate([[5, 6, 7], [8, 9]], params)]
    touch()
    awake = resident()
    freed = engine.release_memory()
    asleep = resident()
    engine.resume_memory()
    again = [r.token_ids for r in engine.generate([[5, 6, 7], [8, 9]], params)]
    touch()
    found.append([freed, awake, asleep, resident(), tokens == again])
print(json.dumps(found))
"""


def test_the_operating_system_has_the_memory_back(tmp_path):
    """By the resident set of a process of its own, twice in a row."""
    path = save_tiny_llama(
        tmp_path, vocab_size=4096, hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4,
        intermediate_size=1536,
    )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    for freed, awake, asleep, again, same_tokens in json.loads(run.stdout):
        assert freed["weights"] > 100e6
        assert freed["kv_cache"] > 60e6
        said = sum(freed.values())
        assert awake - asleep >= 0.9 * said, f"said {said}, fell by {awake - asleep}"
        assert abs(again - awake) < 0.25 * said or again < awake
        assert same_tokens
