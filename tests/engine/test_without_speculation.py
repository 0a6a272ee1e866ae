"""Plain decoding within an engine that drafts: the same tokens, and nothing learned."""

from __future__ import annotations

import pytest
import torch

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.errors import EngineStateError
from tests.helpers.compared import outcome
from tests.helpers.tiny_draft import save_tiny_eagle3

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]
PARAMS = SamplingParams(temperature=0.8, max_new_tokens=24, seed=3, n=2, ignore_eos=True)


@pytest.fixture(params=["ngram", "hybrid"])
def engine(request, tiny_model_path, tmp_path):
    options = {"budget": "fixed"}
    if request.param != "ngram":
        options["draft_path"] = str(save_tiny_eagle3(tmp_path / "draft", tiny_model_path))
    return RolloutEngine.from_pretrained(
        tiny_model_path, request.param, spec_options=options, max_running=4
    )


def test_the_same_tokens_with_nothing_drafted_and_nothing_learned(engine):
    with engine.without_speculation():
        plain = engine.generate(PROMPTS, PARAMS)
        assert engine.metrics().drafted == 0
    drafted = engine.generate(PROMPTS, PARAMS)
    assert engine.metrics().drafted > 0
    tokens, counters = engine.corpus_tokens, engine.worker.counters()
    with engine.without_speculation():
        again = engine.generate([[20, 21, 22]], PARAMS)
    assert engine.corpus_tokens == tokens
    assert engine.worker.counters().keys() == counters.keys()
    assert outcome(plain) == outcome(drafted)
    assert outcome(again) == outcome(engine.generate([[20, 21, 22]], PARAMS))


def test_it_is_switched_between_requests_alone(engine):
    request = engine.submit(PROMPTS[0], PARAMS)
    engine.step()
    with pytest.raises(EngineStateError, match="unfinished"), engine.without_speculation():
        pass
    engine.abort(request.request_id)
    with pytest.raises(RuntimeError, match="of the caller"):
        _fail_in_the_middle(engine)
    (rollout,) = engine.take_ended()
    assert rollout.finish_reason is FinishReason.ABORT
    drafted = engine.metrics().drafted
    engine.generate(PROMPTS, PARAMS)
    assert engine.metrics().drafted > drafted


def _fail_in_the_middle(engine):
    with engine.without_speculation():
        engine.submit(PROMPTS[0], PARAMS)
        engine.step()
        raise RuntimeError("of the caller")


def test_drafts_hear_of_weights_that_came_meanwhile(engine):
    model = engine.worker.target.model
    weights = [
        (name, torch.full(loader.shape, 0.01)) for name, loader in model.weight_loaders().items()
    ]
    heard = []
    engine.worker.budget.change_policy = lambda: heard.append(engine.weight_version)
    with engine.without_speculation():
        engine.update_weights_from_tensor(weights)
    assert heard == [1]
