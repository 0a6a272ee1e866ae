"""`/generate`: the tokens and logprobs of offline generation, whoever asks beside."""

from __future__ import annotations

import pytest

from rollout import SamplingParams
from rollout.server.sglang.generate_body import _HARMLESS
from tests.server.conftest import events_of, post

PROMPTS = [[3 + i % 7, 10 + i, 11, 3 + i % 5] for i in range(12)]
SAMPLING = {"temperature": 0.9, "max_new_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def generated(offline):
    """``generated(prompts, **params)``: what an engine in this process generates."""
    return lambda prompts, **params: offline.generate(prompts, SamplingParams(**params))


def ask(client, **body):
    return post(client, "/generate", **body)


def stream_of(client, **body):
    with client.stream("POST", "/generate", json={"stream": True, **body}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(events_of(answer))


def same(answer, rollout):
    meta = answer["meta_info"]
    pairs = [[logprob, token] for logprob, token, _ in meta["output_token_logprobs"]]
    expected = list(zip(rollout.logprobs, rollout.token_ids, strict=True))
    assert answer["output_ids"] == rollout.token_ids
    assert pairs == [list(pair) for pair in expected]
    assert meta["finish_reason"]["type"] == rollout.finish_reason
    assert meta["request_seed"] == rollout.seed


def test_a_batch_is_bitwise_that_of_offline_generation(client, generated):
    expected = generated(PROMPTS, **SAMPLING, n=3)
    answers = ask(
        client, input_ids=PROMPTS, sampling_params={**SAMPLING, "n": 3}, return_logprob=True
    )
    assert len(answers) == 36
    for answer, rollout in zip(answers, expected, strict=True):
        same(answer, rollout)


def test_fields_without_effect_change_nothing_that_is_answered(client):
    def answered(**fields):
        answer = ask(client, input_ids=PROMPTS[0], sampling_params=SAMPLING, **fields)
        told = ("weight_versions", "finish_reason", "completion_tokens", "prompt_tokens", "seed")
        meta = {name: answer["meta_info"][name] for name in told}
        return answer.keys(), answer["meta_info"].keys(), answer["output_ids"], meta

    plain = answered()
    for name in _HARMLESS:
        for value in ("nonsense", True, 7, ["x"]):
            assert answered(**{name: value}) == plain, name


@pytest.mark.parametrize("scored", [{}, {"return_logprob": True, "logprob_start_len": 0}])
def test_a_prompt_that_nothing_is_generated_for_is_cached(client, scored):
    prompt = [(7 * i + 3 * len(scored)) % 60 + 3 for i in range(40)]
    answer = ask(client, input_ids=prompt, sampling_params={"max_new_tokens": 0}, **scored)
    assert answer["meta_info"]["completion_tokens"] == 0
    after = ask(client, input_ids=[*prompt, 5], sampling_params=SAMPLING)
    assert after["meta_info"]["cached_tokens"] >= len(prompt) - 1


def test_a_sample_can_be_asked_for_alone_and_from_its_middle(client, generated):
    expected = generated(PROMPTS[:2], **SAMPLING, n=2, ignore_eos=True)[3]
    sampling = {"temperature": 0.9, "ignore_eos": True, "request_seed": expected.seed}
    asked = {"return_logprob": True, "sampling_params": sampling | {"max_new_tokens": 12}}
    same(ask(client, input_ids=PROMPTS[1], **asked), expected)
    resumed = PROMPTS[1] + expected.token_ids[:5]
    asked["sampling_params"] = sampling | {"max_new_tokens": 7}
    assert ask(client, input_ids=resumed, **asked)["output_ids"] == expected.token_ids[5:]


def test_without_a_seed_every_request_has_another(client):
    sampling = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    answers = [ask(client, input_ids=[5, 6, 7], sampling_params=sampling) for _ in range(4)]
    assert len({answer["meta_info"]["seed"] for answer in answers}) == 4
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    first = answers[0]
    again = {**sampling, "seed": first["meta_info"]["seed"]}
    repeated = ask(client, input_ids=[5, 6, 7], sampling_params=again)
    assert repeated["output_ids"] == first["output_ids"]


def test_events_say_all_there_is_so_far(client):
    sampling = {**SAMPLING, "max_new_tokens": 40, "ignore_eos": True}
    body = {"text": "one two three", "sampling_params": sampling, "return_logprob": True}
    events = stream_of(client, **body)
    whole = ask(client, **body)
    assert len(events) > 1
    for event in events:
        count = len(event["output_ids"])
        assert event["output_ids"] == whole["output_ids"][:count]
        assert whole["text"].startswith(event["text"])
        meta = event["meta_info"]
        assert meta["completion_tokens"] == count
        assert meta["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"][:count]
        assert (meta["finish_reason"] is None) == (event is not events[-1])
    assert events[-1]["text"] == whole["text"]


def test_prompt_tokens_are_scored_bitwise_as_generated_ones(client, generated):
    (rollout,) = generated([PROMPTS[0]], temperature=1.0, max_new_tokens=10, ignore_eos=True)
    ids = PROMPTS[0] + rollout.token_ids
    zero = {"max_new_tokens": 0, "temperature": 0}
    answer = ask(
        client, input_ids=ids, sampling_params=zero, return_logprob=True, logprob_start_len=0
    )
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in scored] == ids
    assert scored[0][0] is None
    assert [logprob for logprob, _, _ in scored[4:]] == rollout.logprobs
    assert answer["output_ids"] == []
    assert answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    # The way of those who score a target after a prompt.
    one = {"max_new_tokens": 1, "temperature": 0.0}
    answer = ask(
        client, input_ids=ids, sampling_params=one, return_logprob=True, logprob_start_len=3
    )
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [logprob for logprob, _, _ in scored[-10:]] == rollout.logprobs
    assert len(answer["output_ids"]) == 1


def test_top_logprobs_of_prompt_and_output(client):
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    answer = ask(
        client, input_ids=[5, 6, 7], sampling_params=sampling, return_text_in_logprobs=True, **asked
    )
    meta = answer["meta_info"]
    assert meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [2, 2]
    best = [top[0] for top in meta["output_top_logprobs"]]
    assert best == meta["output_token_logprobs"]  # greedy takes the first
    assert " ".join(text for _, _, text in best) == answer["text"]


def test_sampled_tokens_logprobs_are_asked_for_by_their_mode(client):
    sampling = {"temperature": 1.0, "top_k": 3, "max_new_tokens": 3, "sampling_seed": 1}
    body = {"input_ids": [5], "sampling_params": sampling, "return_sampling_mask": True}
    plain, selected = (
        ask(client, **body, **mode)["meta_info"]["output_token_sampling_logprobs"]
        for mode in ({}, {"sampling_logprobs_mode": "selected"})
    )
    assert plain == selected


@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_it_is_no_text_unless_asked_for(client, generated, stream):
    (rollout,) = generated(["one two"], temperature=0, max_new_tokens=10, ignore_eos=True)
    words = rollout.text.split()
    place = next(i for i in range(2, 10) if words[i] not in words[:i])

    def text(**sampling):
        sampling = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True, **sampling}
        body = {"text": "one two", "sampling_params": sampling}
        answer = stream_of(client, **body)[-1] if stream else ask(client, **body)
        assert len(answer["output_ids"]) == place + 1
        return answer["text"], answer["meta_info"]["finish_reason"]

    before, token = " ".join(words[:place]), rollout.token_ids[place]
    by_string = {"type": "stop", "matched": words[place]}
    by_token = {"type": "stop", "matched": token}
    found, reason = text(stop=words[place])
    assert (found.rstrip(), reason) == (before, by_string)
    assert text(stop=[words[place]], no_stop_trim=True) == (f"{before} {words[place]}", by_string)
    assert text(stop_token_ids=[token]) == (before, by_token)
    assert text(stop_token_ids=[token], no_stop_trim=True) == (f"{before} {words[place]}", by_token)


def test_a_match_ends_it_and_stays_in_the_text_with_drafts_as_without(open_server, generated):
    sampling = {"temperature": 0.5, "seed": 3, "max_new_tokens": 60, "ignore_eos": True}
    (plain,) = generated(["one two"], **sampling)
    last = plain.text.split()[20]
    pattern = rf"(?s)\w+ .*{last}$"
    (expected,) = generated(["one two"], **sampling, stop_regex=[pattern])
    assert expected.text.split()[-1] == last
    assert expected.token_ids == plain.token_ids[: len(expected.token_ids)]
    live = open_server({"spec_options": {"budget": "fixed", "min_probability": 0.0}})
    num_accepted = 0
    with live.client() as client:
        body = {"text": "one two", "sampling_params": sampling, "return_logprob": True}
        ask(client, **body)  # drafts know what would come behind the match
        sampling["stop_regex"] = pattern
        for answer in (ask(client, **body), stream_of(client, **body)[-1]):
            same(answer, expected)
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
            assert answer["text"] == expected.text
            num_accepted += answer["meta_info"]["spec_accept_token_num"]
    assert num_accepted > 0


def test_meta_info_has_what_trainers_read(client):
    sampling = {**SAMPLING, "ignore_eos": True}
    meta = ask(client, rid="mine", input_ids=[5, 6, 7], sampling_params=sampling)["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 12)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 12}]
    assert meta["seed"] == 5
    assert meta["spec_verify_ct"] + meta["spec_accept_token_num"] == 12
    assert meta["spec_draft_token_num"] >= meta["spec_accept_token_num"]
    assert meta["cached_tokens"] >= 0
    assert meta["e2e_latency"] > 0
