"""The budget may change only the time: tokens and logprobs are those of plain decoding."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from tests.helpers.gates import FlickeringGate, ShutGate
from tests.helpers.tiny_model import save_tiny_llama

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12], list(range(20, 70))]
PARAMS = SamplingParams(temperature=0.6, max_new_tokens=24, seed=3, n=3)
EPOCHS = 3
UPDATED = 2  # the epoch before which the weights change
NGRAM = {"corpus_bytes": 1 << 20}


def make_engine(path, spec="ngram", **options):
    options = {} if spec == "none" else NGRAM | options
    return RolloutEngine.from_pretrained(
        str(path), spec, spec_options=options, max_running=5, num_threads=1, chunk_len=32
    )


@pytest.fixture(scope="module")
def new_weights(tmp_path_factory):
    folder = save_tiny_llama(tmp_path_factory.mktemp("new"), seed=1)
    return load_file(folder / "model.safetensors")


def numbers(rollouts):
    return [(r.token_ids, r.logprobs, r.weight_versions, r.finish_reason) for r in rollouts]


def epochs(engine, new_weights):
    """Tokens, logprobs and weight versions of each epoch."""
    for epoch in range(EPOCHS):
        if epoch == UPDATED:
            engine.update_weights_from_tensor(list(new_weights.items()))
        yield numbers(engine.generate(PROMPTS, PARAMS))
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0


@pytest.fixture(scope="module")
def plain(tiny_model_path, new_weights):
    return list(epochs(make_engine(tiny_model_path, "none"), new_weights))


@pytest.fixture(scope="module")
def fed_each_step(tiny_model_path, new_weights):
    """Counters of a corpus that is told every token at once."""
    engine = make_engine(tiny_model_path, budget="fixed")
    list(epochs(engine, new_weights))
    return engine.worker.counters()


@pytest.mark.parametrize(("seed", "within"), [(1, False), (2, True)])
def test_no_gate_can_be_seen(tiny_model_path, new_weights, plain, fed_each_step, seed, within):
    """And the corpus comes to hold the same, whenever it is told."""
    engine = make_engine(tiny_model_path, calibration_seconds=0)
    engine.worker.budget._gate = FlickeringGate(seed, within=within)
    assert list(epochs(engine, new_weights)) == plain
    counters = engine.worker.counters()
    for name in ("live_tokens", "inserted_tokens", "open_sequences"):
        assert counters[f"corpus/{name}"] == fed_each_step[f"corpus/{name}"]
    assert counters["corpus/proposals"] > 0


def test_a_gate_that_never_opens(tiny_model_path, new_weights, plain, fed_each_step):
    engine = make_engine(tiny_model_path, calibration_seconds=0)
    assert engine.worker.max_draft_tokens == 16
    engine.worker.budget._gate = ShutGate()
    assert engine.worker.max_draft_tokens == 0
    assert list(epochs(engine, new_weights)) == plain
    counters = engine.worker.counters()
    assert counters["corpus/proposals"] == 0
    assert counters["corpus/live_tokens"] == fed_each_step["corpus/live_tokens"]
    assert engine.metrics().drafted == 0


def test_calibration_leaves_nothing_behind_and_fits_a_short_context(tiny_model_path, tmp_path):
    engine = make_engine(tiny_model_path, calibration_seconds=60)  # 64 forwards at most
    assert engine.worker.budget.costs.is_known
    usage = engine.worker.memory.usage
    assert usage.used == usage.cached == 0
    assert not make_engine(tiny_model_path, calibration_seconds=0).worker.budget.costs.is_known
    path = save_tiny_llama(tmp_path / "short", max_positions=64)  # shorter than what is timed
    engine = make_engine(path, calibration_seconds=0.05)
    assert not engine.worker.budget.costs.is_known
    assert len(engine.generate([[5, 6, 7]], PARAMS)) == PARAMS.n
