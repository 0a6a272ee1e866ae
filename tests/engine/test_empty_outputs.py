"""Many rollouts without text are warned of once, with the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollout import RolloutEngine, SamplingParams

END = 2  # </s> of the text model
EMPTY = SamplingParams(max_new_tokens=8, stop_token_ids=[END], logit_bias={END: 100.0}, n=2)
FULL = replace(EMPTY, logit_bias={END: -100.0})


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "no text" in record.getMessage()]


def test_many_empty_rollouts_are_warned_of_once(text_model_path, caplog):
    engine = RolloutEngine.from_pretrained(text_model_path, spec="none", num_threads=1)
    chat = [{"role": "user", "content": "one"}]
    engine.generate([chat] * 20, FULL)
    rollouts = engine.generate(["one"], EMPTY)
    assert [rollout.is_empty for rollout in rollouts] == [True, True]
    (handed_on,) = engine.generate(["one"], replace(EMPTY, n=1))
    for _ in range(4):  # what was cut and goes on may well be at its end
        engine.submit("one", EMPTY, partial_ids=handed_on.token_ids)
        assert [rollout.is_empty for rollout in engine.step()] == [True]
    assert not warnings_of(caplog)  # 3 of 43
    engine.generate(["one"], EMPTY)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("5 of the first 45 rollouts have no text: the model stopped at once")
    for remedy in ('[{"role": "user"', "data.chat_template", "/v1/chat/completions"):
        assert remedy in warning
    engine.generate(["one"], EMPTY)
    assert len(warnings_of(caplog)) == 1


def test_rollouts_that_are_still_running_count(text_model_path, caplog):
    """Empty ones end first: four that are the first to end say nothing of a large batch."""
    engine = RolloutEngine.from_pretrained(text_model_path, "none", num_threads=1, max_running=64)
    few = [EMPTY, EMPTY, *[FULL] * 20]
    assert [each.is_empty for each in engine.generate(["one"] * 22, few)].count(True) == 4
    assert not warnings_of(caplog)
