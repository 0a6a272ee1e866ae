"""Seeds of samples, and how a cut request gets its own again."""

from __future__ import annotations

import random

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.engine.tokenizer import prompt_group
from rollout.trainers.verl.sampling import RequestSeeds, RequestStart

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 12]]


def seeds_of(book, prompt, step, count):
    return [book.start(prompt_group(prompt), len(prompt), step).seed for _ in range(count)]


def test_the_samples_of_a_prompt_are_the_same_set_in_whatever_order_they_begin():
    """They differ by prompt, step and run."""
    shuffled, order = RequestSeeds(42), PROMPTS * 8
    random.Random(0).shuffle(order)
    got: dict[tuple[int, ...], set[int]] = {tuple(prompt): set() for prompt in PROMPTS}
    for prompt in order:
        got[tuple(prompt)] |= set(seeds_of(shuffled, prompt, 1, 1))
    in_order = RequestSeeds(42)
    assert got == {tuple(prompt): set(seeds_of(in_order, prompt, 1, 8)) for prompt in PROMPTS}
    others = [
        set(seeds_of(RequestSeeds(run), PROMPTS[0], step, 4)) for run in (1, 2) for step in (3, 4)
    ]
    assert len(set.union(*got.values(), *others)) == 8 * len(PROMPTS) + 16


def test_a_replica_behind_repeats_no_seed():
    book = RequestSeeds(0)
    drawn = [
        seed for step in (1, 2, 1, 30, 2, 1, 29, 30) for seed in seeds_of(book, PROMPTS[0], step, 5)
    ]
    assert len(set(drawn)) == len(drawn)


def test_cut_requests_get_their_seeds_back():
    book = RequestSeeds(7)
    prompt, partial = PROMPTS[0], [20, 21]
    key, longer = prompt_group(prompt), prompt_group([*prompt, *partial])
    starts = [book.start(key, 3, 1) for _ in range(3)]
    book.cut(longer, starts[0])
    for start in starts[1:]:  # before they emitted anything
        book.cut(key, start)
    assert book.start(longer, 5, 2) == starts[0] == RequestStart(starts[0].seed, 3)
    assert {book.start(key, 3, 2) for _ in range(2)} == set(starts[1:])
    assert book.start(longer, 5, 2).prompt_len == 5  # nothing waits any more: a prompt of its own


def test_a_request_cut_twice_ends_as_if_it_had_never_been(tiny_model_path):
    params = SamplingParams(temperature=0.9, max_new_tokens=40, repetition_penalty=1.1)
    engine = RolloutEngine.from_pretrained(tiny_model_path, max_running=4)
    book = RequestSeeds(3)
    prompt = PROMPTS[0]

    def run(tokens, steps):
        start = book.start(prompt_group(tokens), len(tokens), 0)
        prompt_ids, partial = tokens[: start.prompt_len], tokens[start.prompt_len :]
        request = engine.submit(prompt_ids, params, request_seed=start.seed, partial_ids=partial)
        ended = []
        for _ in range(steps):
            ended += engine.step()
        engine.abort(request.request_id)
        (rollout,) = ended + engine.step()
        if rollout.finish_reason is FinishReason.ABORT:
            book.cut(prompt_group([*tokens, *rollout.token_ids]), start)
        return rollout

    first = run(prompt, 3)
    second = run([*prompt, *first.token_ids], 3)
    third = run([*prompt, *first.token_ids, *second.token_ids], 100)
    assert first.token_ids
    assert second.token_ids
    assert third.finish_reason is not FinishReason.ABORT
    engine.submit(prompt, params, request_seed=first.seed)
    while engine.has_unfinished:
        for uncut in engine.step():
            parts = (first, second, third)
            assert uncut.token_ids == [token for part in parts for token in part.token_ids]
            assert uncut.logprobs == [value for part in parts for value in part.logprobs]
