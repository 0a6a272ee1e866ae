"""`/generate`: the tokens and logprobs of offline generation, whoever asks beside."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout import SamplingParams
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


def test_concurrent_requests_are_bitwise_those_of_offline_generation(live, generated):
    """Whole ones and streams, in any order, each the only prompt of its call."""
    jobs = [
        (prompt, seed, stream) for prompt in PROMPTS[:6] for seed in (1, 2) for stream in (0, 1)
    ]
    random.Random(0).shuffle(jobs)
    expected = {
        (tuple(prompt), seed): generated([prompt], **{**SAMPLING, "seed": seed})[0]
        for prompt in PROMPTS[:6]
        for seed in (1, 2)
    }

    def run(job):
        prompt, seed, stream = job
        body = {
            "input_ids": prompt,
            "sampling_params": {**SAMPLING, "seed": seed},
            "return_logprob": True,
        }
        with live.client() as client:
            return stream_of(client, **body)[-1] if stream else ask(client, **body)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, jobs))
    for (prompt, seed, _), answer in zip(jobs, answers, strict=True):
        same(answer, expected[tuple(prompt), seed])


def test_each_sample_can_be_asked_for_alone_by_its_request_seed(client, generated):
    expected = generated(PROMPTS[:2], **SAMPLING, n=2)[3]
    sampling = {"temperature": 0.9, "max_new_tokens": 12, "request_seed": expected.seed}
    answer = ask(client, input_ids=PROMPTS[1], sampling_params=sampling, return_logprob=True)
    same(answer, expected)


def test_without_a_seed_every_request_has_another(client):
    sampling = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    answers = [ask(client, input_ids=[5, 6, 7], sampling_params=sampling) for _ in range(4)]
    assert len({answer["meta_info"]["seed"] for answer in answers}) == 4
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    first = answers[0]
    again = {**sampling, "seed": first["meta_info"]["seed"]}
    assert (
        ask(client, input_ids=[5, 6, 7], sampling_params=again)["output_ids"]
        == (first["output_ids"])
    )


def test_an_aborted_rollout_resubmitted_with_its_partial_goes_on_as_if_never_cut(client, generated):
    (whole,) = generated([PROMPTS[0]], **{**SAMPLING, "ignore_eos": True})
    rest = ask(
        client,
        input_ids=PROMPTS[0] + whole.token_ids[:5],
        sampling_params={
            "temperature": 0.9,
            "max_new_tokens": 7,
            "ignore_eos": True,
            "request_seed": whole.seed,
        },
    )
    assert rest["output_ids"] == whole.token_ids[5:]


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


def test_a_streamed_batch_names_each_events_sample(client, generated):
    expected = generated(PROMPTS[:2], **SAMPLING, n=2)
    events = stream_of(
        client, input_ids=PROMPTS[:2], sampling_params={**SAMPLING, "n": 2}, return_logprob=True
    )
    last = {event["index"]: event for event in events if event["meta_info"]["finish_reason"]}
    assert sorted(last) == [0, 1, 2, 3]
    for index, rollout in enumerate(expected):
        same(last[index], rollout)


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
    answer = ask(
        client,
        input_ids=[5, 6, 7],
        sampling_params={"temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert meta["input_top_logprobs"][0] is None
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [2, 2]
    best = [top[0] for top in meta["output_top_logprobs"]]
    assert best == meta["output_token_logprobs"]  # greedy takes the first
    assert " ".join(text for _, _, text in best) == answer["text"]


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
    assert text(stop_token_ids=[token], no_stop_trim=True) == (
        f"{before} {words[place]}",
        by_token,
    )


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


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "one", "input_ids": [5]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[5], []]}, "input_ids[1]"),
        ({"input_ids": [97]}, "input_ids"),
        ({"text": []}, "batch"),
        ({"input_ids": [5] * 512}, "len(prompt)"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "sampling.temperature"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": -1}}, "min_new_tokens"),
        ({"input_ids": [5], "sampling_params": {"ebnf": "x"}}, "sampling_params.ebnf"),
        ({"input_ids": [5], "sampling_params": {"regex": "a+"}}, "sampling.regex"),  # of words
        ({"input_ids": [5], "sampling_params": {"seed": 1, "sampling_seed": 2}},
         "sampling_params.seed"),
        ({"input_ids": [5], "sampling_params": {"seed": 2**64}}, "sampling.seed"),
        ({"input_ids": [5], "sampling_params": {"request_seed": -1}}, "request_seed"),
        ({"input_ids": [5], "sampling_params": {"stop_token_ids": [97]}}, "stop_token_ids"),
        ({"input_ids": [5], "sampling_params": {"logit_bias": {"x": 1}}},
         "sampling_params.logit_bias"),
        ({"input_ids": [5], "sampling_params": {"top_k": 2**80}}, None),
        ({"input_ids": [5], "sampling_params": {"n": 10**12}}, "batch"),
        ({"input_ids": [5], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"input_ids": [5], "lora_path": "x"}, "lora_path"),
        ({"input_ids": [5], "image_data": ["x"]}, "image_data"),
        ({"input_ids": [5], "return_hidden_states": True}, "return_hidden_states"),
        ({"input_ids": [5], "rid": ""}, "rid"),
        ({"input_ids": [5], "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"input_ids": [5], "sampling_params": {"stop": ["x"] * 65}}, "stop"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_refused_by_the_name_of_its_field(client, body, field, stream):
    answer = client.post("/generate", json={**body, "stream": stream})
    if field is None:
        assert answer.status_code == 200
        return
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


def test_fields_of_wrong_types_and_bodies_that_are_no_json(client):
    answer = client.post("/generate", json={"input_ids": "five"})
    assert answer.status_code == 422
    assert "input_ids" in answer.json()["error"]["message"]
    hot = {"temperature": "hot"}
    for sampling, place in [(hot, "temperature"), ([{}, hot], "1.temperature")]:
        answer = client.post("/generate", json={"input_ids": [5], "sampling_params": sampling})
        assert answer.json()["error"]["param"] == f"sampling_params.{place}"
    answer = client.post("/generate", content=b"{", headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
