"""vLLM's calls with token ids: the ids that were sampled are continued."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout import SamplingParams
from tests.server.conftest import events_of, post

GENERATE = "/inference/v1/generate"
CONVERSATION = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]


@pytest.fixture(scope="module")
def tokenizer(text_model_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(text_model_path)


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    """Read as the renderers' client does: one finite number for each id, and its name."""
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert all(math.isfinite(each["logprob"]) for each in content)
    return [each["logprob"] for each in content]


def test_a_second_turn_continues_the_ids_of_the_first(client, offline):
    prompt = [5, 9, 11]
    for seed, tool_result in ((3, [7, 8]), (4, [])):
        sampling = {"temperature": 0.9, "max_tokens": 9, "seed": seed, "logprobs": 1}
        answer = post(
            client, GENERATE, token_ids=prompt, request_id="turn",
            sampling_params=sampling | {"skip_special_tokens": False, "detokenize": False},
        )  # fmt: skip
        (expected,) = offline.generate(
            [prompt], SamplingParams(temperature=0.9, max_new_tokens=9, seed=seed)
        )
        (choice,) = answer["choices"]
        assert answer["request_id"] == "turn"
        assert choice["token_ids"] == expected.token_ids
        assert logprobs_of(choice) == expected.logprobs
        assert choice["finish_reason"] == expected.finish_reason
        assert answer["weight_version"] == str(expected.weight_versions[-1])
        spec = answer["request_spec_decode_stats"]
        assert 0 <= spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]
        assert spec["num_spec_steps"] >= 1
        prompt = [*prompt, *choice["token_ids"], *tool_result]
    body = {"temperature": 0.9, "ignore_eos": True, "seed": 1}
    (choice,) = post(client, GENERATE, token_ids=[5] * 490, sampling_params=body)["choices"]
    assert (len(choice["token_ids"]), choice["logprobs"]) == (22, None)  # what the context leaves
    assert choice["finish_reason"] == "length"


def test_several_samples_and_their_stream(client, offline):
    body = {
        "token_ids": [5, 6],
        "sampling_params": {"n": 3, "max_tokens": 7, "seed": 2, "logprobs": 0},
        "return_token_ids": True,
    }
    whole = post(client, GENERATE, **body)
    expected = offline.generate([[5, 6]], SamplingParams(n=3, max_new_tokens=7, seed=2))
    assert whole["prompt_token_ids"] == [5, 6]
    assert [choice["token_ids"] for choice in whole["choices"]] == [
        each.token_ids for each in expected
    ]
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    options = {"stream": True, "stream_options": usage}
    with client.stream("POST", GENERATE, json=body | options) as answer:
        events = list(events_of(answer))
    assert events.pop()["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert events[-1]["request_spec_decode_stats"]["num_spec_steps"] >= 3
    for event in events:
        assert event["weight_version"] == "0"
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["token_ids"]
            assert len(logprobs_of(choice)) == len(choice["token_ids"])
            assert event["usage"]["completion_tokens"] == len(streamed[choice["index"]])
    assert list(streamed.values()) == [each.token_ids for each in expected]


def test_prompt_logprobs_are_those_of_sampling(client, offline):
    """prime-rl reads the first entry of each position, TRL sorts by rank."""
    (rollout,) = offline.generate([[5, 6]], SamplingParams(max_new_tokens=6, seed=7))
    ids = rollout.prompt_ids + rollout.token_ids
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 2}
    answers = [
        post(client, GENERATE, token_ids=ids, sampling_params=sampling),
        post(client, "/v1/completions", prompt=[ids], **sampling)["choices"][0],
    ]
    for answer in answers:
        positions = answer["prompt_logprobs"]
        assert positions[0] is None
        assert [int(next(iter(each))) for each in positions[1:]] == ids[1:]
        firsts = [next(iter(each.values())) for each in positions[1:]]
        assert [each["logprob"] for each in firsts[1:]] == rollout.logprobs
        for each, first in zip(positions[1:], firsts, strict=True):
            ranks = [entry["rank"] for entry in each.values()]
            assert set(ranks) in ({1, 2}, {1, 2, 3})
            likelier = sum(entry["logprob"] > first["logprob"] for entry in each.values())
            assert first["rank"] == likelier + 1


def test_texts_and_chats_become_ids_and_back(live, client, tokenizer):
    name = f"org/{live.serving.model_name}"
    answer = post(client, "/tokenize", prompt="one two", return_token_strs=True, model=name)
    ids = tokenizer("one two")["input_ids"]
    assert answer == {
        "count": 2, "max_model_len": 512, "tokens": ids, "token_strs": ["one", "two"],
    }  # fmt: skip
    for fields, begins in (
        ({}, True),
        ({"add_generation_prompt": False}, False),
        ({"add_generation_prompt": False, "continue_final_message": True}, False),
    ):
        answer = post(client, "/tokenize", messages=CONVERSATION, **fields)
        options = {"add_generation_prompt": begins}
        if "continue_final_message" in fields:
            options["continue_final_message"] = True
        text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False, **options)
        assert answer["tokens"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert answer["count"] == len(answer["tokens"])
    assert post(client, "/detokenize", tokens=[3, 7, 96])["prompt"] == tokenizer.decode([3, 7, 96])
    assert post(client, "/detokenize", tokens=[]) == {"prompt": ""}


def test_a_rendered_chat_generates_what_the_chat_does(client):
    chat = {
        "messages": CONVERSATION[:1], "seed": 5, "temperature": 0.8, "logprobs": True,
        "max_completion_tokens": 7, "cache_salt": "step-1",
    }  # fmt: skip
    rendered = post(client, "/v1/chat/completions/render", **chat)
    assert rendered["features"] is None
    generated = post(client, GENERATE, **rendered)["choices"][0]
    fields = chat | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answered = post(client, "/v1/chat/completions", **fields)
    assert rendered["token_ids"] == answered["prompt_token_ids"]
    (choice,) = answered["choices"]
    assert generated["token_ids"] == choice["token_ids"]
    assert logprobs_of(generated) == logprobs_of(choice)
    of_tokens = post(
        client, "/v1/chat/completions/tokens", **fields | {"messages": []},
        tokens=rendered["token_ids"],
    )  # fmt: skip
    assert of_tokens["choices"] == answered["choices"]
    assert of_tokens["prompt_token_ids"] == rendered["token_ids"]


def test_the_former_call_of_a_prompt_in_ids(client, offline):
    """Atropos reads the first id of each position, and its logprob."""
    prompt = {"prompt_token_ids": [5, 6]}
    answer = post(client, "/generate", prompt=prompt, logprobs=0, n=2, seed=8, max_tokens=7)
    expected = offline.generate([[5, 6]], SamplingParams(n=2, max_new_tokens=7, seed=8))
    for positions, ids, rollout in zip(
        answer["logprobs"], answer["token_ids"], expected, strict=True
    ):
        firsts = [next(iter(position[0].items())) for position in positions]
        assert [int(id) for id, _ in firsts] == ids == rollout.token_ids
        assert [logprob for _, logprob in firsts] == rollout.logprobs
    assert answer["finish_reasons"] == [str(rollout.finish_reason) for rollout in expected]
    assert answer["text"] == [rollout.text for rollout in expected]
