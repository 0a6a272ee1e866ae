"""A stream's order and content: the same with drafts, forecasts and company as without."""

from __future__ import annotations

from itertools import islice

import pytest

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.config import engine_config
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.plain_order import plain_order

MAX_RUNNING = 3
PROMPTS = [[5 + index, 6, 7 + 2 * index, 8][: 2 + index % 3] for index in range(6)]
PARAMS = SamplingParams(
    temperature=1.0, max_new_tokens=40, n=3, seed=4, stop_token_ids=[11, 12, 13, 14]
)


def as_they_ended(engine):
    """Who ended when, by `submit` and `step`."""
    for index, prompt in enumerate(PROMPTS):
        for sample in range(PARAMS.n):
            engine.submit(prompt, PARAMS, prompt_index=index, sample_index=sample)
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    return numbers(ended)


def oracle(path, plain, **options):
    recorded = {
        (prompt, sample): PROMPTS[prompt] + token_ids for prompt, sample, token_ids, *_ in plain
    }
    config = engine_config(path, {"max_running": MAX_RUNNING})
    return RolloutEngine.from_config(config, oracle_factory(recorded, **options))


@pytest.fixture(scope="module")
def plain(tiny_model_path):
    """Plain decoding, nothing known of lengths."""
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=MAX_RUNNING)
    return numbers(engine.stream(PROMPTS, PARAMS))


def test_the_order_is_that_of_the_lengths(plain):
    in_arrival = sorted(plain)
    lengths = [len(token_ids) for _, _, token_ids, *_ in in_arrival]
    assert len(set(lengths)) > 6
    assert plain == [in_arrival[place] for place in plain_order(lengths, MAX_RUNNING)]


@pytest.mark.parametrize(("size", "right", "chain"), [(8, 0.6, False), (30, 0.95, True)])
def test_drafts_cannot_be_seen(tiny_model_path, plain, size, right, chain):
    engine = oracle(tiny_model_path, plain, size=size, right=right, chain=chain)
    assert numbers(engine.stream(PROMPTS, PARAMS)) == plain
    assert engine.metrics().accepted > 0
    engine.check_integrity()
    if chain:  # without an order of its own
        assert as_they_ended(engine) != plain


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_an_earlier_epoch_cannot_be_seen(tiny_model_path, plain, spec):
    """Lengths are known, so admission is another, and the corpus drafts well."""
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec=spec, max_running=MAX_RUNNING)
    engine.generate(PROMPTS, PARAMS)
    assert numbers(engine.stream(PROMPTS, PARAMS)) == plain
    assert as_they_ended(engine) != plain
    assert numbers(islice(engine.stream(PROMPTS, PARAMS), 7)) == plain[:7]
    assert not engine.has_unfinished
    engine.check_integrity()


def test_streams_side_by_side_have_the_order_of_each_alone(tiny_model_path, plain):
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec="ngram", max_running=MAX_RUNNING)
    first, second = engine.stream(PROMPTS, PARAMS), engine.stream(PROMPTS, PARAMS)
    engine.submit(PROMPTS[0], PARAMS)
    pairs = list(zip(first, second, strict=True))
    assert numbers(one for one, _ in pairs) == numbers(other for _, other in pairs) == plain


def test_aborted_rollouts_of_a_stream_come_at_once(tiny_model_path, plain):
    engine = RolloutEngine.from_pretrained(tiny_model_path, spec="none", max_running=MAX_RUNNING)
    stream = engine.stream(PROMPTS, PARAMS)
    taken = [next(stream)]
    aborted = [*engine.scheduler.running[:1], *engine.scheduler.waiting[-2:]]
    for request in aborted:
        engine.abort(request.request_id)
    taken += islice(stream, 3)
    assert [r.finish_reason for r in taken[1:]] == [FinishReason.ABORT] * 3
    taken += stream
    assert len(taken) == len(plain)
    assert sorted((r.prompt_index, r.sample_index) for r in taken) == [
        (prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(PARAMS.n)
    ]
