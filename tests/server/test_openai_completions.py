"""`/v1/completions` by the official client: tokens, logprobs and texts of offline generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from rollout import Rollout, RolloutEngine, SamplingParams
from tests.server.conftest import Live, run_server
from tests.server.openai_clients import client_of, joined_parts

PROMPT = "one two three"
IDS = [7, 8, 9]


def one(engine: RolloutEngine, prompt: str | list[int], **params: object) -> Rollout:
    (rollout,) = engine.generate([prompt], SamplingParams(**params))
    return rollout


def test_the_tokens_of_offline_generation_bit_for_bit(live: Live, offline: RolloutEngine) -> None:
    expected = one(
        offline, PROMPT, seed=5, temperature=0.9, max_new_tokens=24, ignore_eos=True, top_logprobs=3
    )
    answer = client_of(live).completions.create(
        model=live.serving.model_name,
        prompt=PROMPT,
        seed=5,
        temperature=0.9,
        max_tokens=24,
        logprobs=3,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    (choice,) = answer.choices
    assert (choice.text, choice.token_ids) == (expected.text, expected.token_ids)
    assert choice.prompt_token_ids == IDS
    assert choice.finish_reason == "length"
    assert choice.weight_versions == [[0, 0, 24]]
    assert answer.system_fingerprint == "weights-0"
    # Equal, not close: a float passes through JSON unchanged.
    assert choice.logprobs.token_logprobs == expected.logprobs
    for place, top in enumerate(choice.logprobs.top_logprobs):
        chosen = (expected.token_ids[place], expected.logprobs[place])
        assert set(top.values()) == {
            logprob for _, logprob in [chosen, *expected.extras.top_logprobs[place]]
        }
    # Each token is where its text begins; the spaces are the tokens'.
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].lstrip().startswith(token.lstrip())


def test_all_sampling_fields_arrive(live: Live, offline: RolloutEngine) -> None:
    expected = one(
        offline,
        IDS,
        seed=11,
        temperature=1.2,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={12: 3.0, 13: -2.0},
        stop_token_ids=[40],
        min_new_tokens=3,
        max_new_tokens=40,
    )
    answer = client_of(live).completions.create(
        model=live.serving.model_name,
        prompt=IDS,
        seed=11,
        temperature=1.2,
        top_p=0.95,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={"12": 3, "13": -2},
        max_tokens=40,
        logprobs=0,
        extra_body={
            "top_k": 20,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "stop_token_ids": [40],
            "min_tokens": 3,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        },
    )
    (choice,) = answer.choices
    assert choice.token_ids == expected.token_ids
    assert choice.finish_reason == str(expected.finish_reason)
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in expected.token_ids]
    assert choice.logprobs.token_logprobs == expected.logprobs
    assert [len(top) for top in choice.logprobs.top_logprobs] == [1] * len(expected.token_ids)


@pytest.mark.parametrize("prompts", [["one two", "three four five"], [[7, 8], [9, 10, 11]]])
def test_several_prompts_and_samples(
    live: Live, offline: RolloutEngine, prompts: list[str] | list[list[int]]
) -> None:
    expected = offline.generate(prompts, SamplingParams(seed=3, n=3, max_new_tokens=8))
    answer = client_of(live).completions.create(
        model=live.serving.model_name, prompt=prompts, n=3, best_of=3, seed=3, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [rollout.text for rollout in expected]
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == sum(len(rollout.token_ids) for rollout in expected)
    assert answer.usage.total_tokens == 5 + answer.usage.completion_tokens
    assert answer.usage.spec_verify_ct > 0


def test_sixteen_tokens_by_default(live: Live) -> None:
    answer = client_of(live).completions.create(
        model=live.serving.model_name, prompt=IDS, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16


def test_without_a_seed_every_call_is_another(live: Live) -> None:
    client = client_of(live)
    texts = {
        client.completions.create(
            model=live.serving.model_name,
            prompt=IDS,
            max_tokens=24,
            temperature=1.0,
            extra_body={"ignore_eos": True},
        )
        .choices[0]
        .text
        for _ in range(5)
    }
    assert len(texts) == 5


def test_a_stop_string_ends_the_text_before_it(live: Live, offline: RolloutEngine) -> None:
    words_alone = dict.fromkeys(range(6), -100.0)  # no special tokens
    free = one(offline, IDS, seed=2, max_new_tokens=30, logit_bias=words_alone)
    assert free.text is not None
    words = free.text.split()
    place = next(
        i for i in range(4, 30) if not any(word.startswith(words[i]) for word in words[:i])
    )
    create = client_of(live).completions.create
    answer = create(
        model=live.serving.model_name,
        prompt=IDS,
        seed=2,
        max_tokens=30,
        stop=[" " + words[place], "never"],
        logit_bias={str(token): -100 for token in words_alone},
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.text == " ".join(words[:place])
    assert choice.token_ids == free.token_ids[: place + 1]


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
def test_echo_puts_the_prompt_first(
    live: Live, offline: RolloutEngine, prompt: str | list[int]
) -> None:
    params = SamplingParams(seed=4, temperature=0.7, max_new_tokens=6, ignore_eos=True)
    (expected,) = offline.generate([prompt], params)
    of_prompt = offline.score(IDS[:1], IDS[1:], params)
    asked = {
        "model": live.serving.model_name,
        "prompt": prompt,
        "seed": 4,
        "temperature": 0.7,
        "max_tokens": 6,
        "echo": True,
        "logprobs": 1,
        "extra_body": {"ignore_eos": True},
    }
    (choice,) = client_of(live).completions.create(**asked).choices
    assert choice.text == PROMPT + expected.text
    assert choice.logprobs.token_logprobs == [None, *of_prompt, *expected.logprobs]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset[:4] == [0, 3, 7, len(PROMPT)]

    chunks = list(client_of(live).completions.create(**asked, stream=True))
    streamed = joined_parts(chunks)[0]
    assert streamed["text"] == choice.text
    logprobs = [lp for part in streamed["logprobs"] for lp in part.token_logprobs]
    offsets = [at for part in streamed["logprobs"] for at in part.text_offset]
    assert logprobs == choice.logprobs.token_logprobs
    assert offsets == choice.logprobs.text_offset


def test_a_prompt_can_be_scored_alone(live: Live, offline: RolloutEngine) -> None:
    """Evaluation harnesses do this; generated tokens have the logprobs they were sampled with."""
    params = SamplingParams(seed=4, temperature=0.7, max_new_tokens=12, ignore_eos=True)
    (sampled,) = offline.generate([IDS], params)
    answer = client_of(live).completions.create(
        model=live.serving.model_name,
        prompt=[[*IDS, *sampled.token_ids], [5]],
        temperature=0.7,
        max_tokens=0,
        echo=True,
        logprobs=0,
    )
    scored, alone = answer.choices
    assert scored.logprobs.token_logprobs[len(IDS) :] == sampled.logprobs
    assert alone.logprobs.token_logprobs == [None]
    assert answer.usage.completion_tokens == 0
    assert scored.finish_reason == "length"


def test_a_model_without_a_tokenizer_answers_in_ids(tiny_model_path: Path) -> None:
    with run_server(tiny_model_path, {"spec": "none"}, {}) as live:
        asked = {
            "model": live.serving.model_name,
            "prompt": IDS,
            "max_tokens": 4,
            "logprobs": 1,
            "seed": 1,
            "extra_body": {"return_token_ids": True},
        }
        (choice,) = client_of(live).completions.create(**asked).choices
        assert choice.text == ""
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
        streamed = joined_parts(client_of(live).completions.create(**asked, stream=True))[0]
        assert (streamed["text"], streamed["token_ids"]) == ("", choice.token_ids)
        with pytest.raises(openai.BadRequestError, match="tokenizer"):
            client_of(live).completions.create(**{**asked, "prompt": "one"})
        with pytest.raises(openai.BadRequestError, match="tokenizer"):
            client_of(live).chat.completions.create(
                model=live.serving.model_name, messages=[{"role": "user", "content": "one"}]
            )


def test_models(live: Live) -> None:
    client = client_of(live)
    (model,) = client.models.list().data
    assert model.id == live.serving.model_name
    assert model.max_model_len == 512
    assert client.models.retrieve(model.id) == model


def test_what_gateways_add_is_let_through(live: Live) -> None:
    """Whatever they send for fields that nobody set."""
    name = live.serving.model_name
    chat = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 1}
    generate = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    neutral = {
        "best_of": 1, "truncate_prompt_tokens": -1, "rid": "name", "no_stop_trim": False,
        "add_special_tokens": True,
    }  # fmt: skip
    with live.client() as client:
        for model in ("unknown", "default", "", f"org/{name}", live.serving.model_path, name):
            for path, body in (("/v1/chat/completions", chat), ("/generate", generate)):
                answer = client.post(path, json=body | {"model": model})
                assert answer.status_code == 200, answer.text
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", COMPLETION)):
            assert client.post(path, json=body | neutral).status_code == 200
        for model in ("another", f"{name}/another"):
            answer = client.post("/generate", json=generate | {"model": model})
            assert answer.status_code == 404
            assert model in answer.json()["error"]["message"]


COMPLETION = {"prompt": "one two", "max_tokens": 8, "seed": 4, "ignore_eos": True}


def test_fields_of_other_servers_that_have_an_effect(live: Live) -> None:
    with live.client() as client:

        def choice(**fields: Any) -> dict[str, Any]:
            answer = client.post("/v1/completions", json=COMPLETION | fields)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        plain = choice(logprobs=1)
        assert choice(logprobs=True) == plain
        assert choice(logprobs=False)["logprobs"] is None
        stop = plain["text"].split()[3]
        trimmed = choice(stop=stop)["text"]
        assert choice(stop=stop, no_stop_trim=True)["text"] == trimmed + stop
        assert choice(stop=stop, include_stop_str_in_output=True)["text"] == trimmed + stop
        assert choice(add_special_tokens=False)["text"] == plain["text"]  # of which are none
