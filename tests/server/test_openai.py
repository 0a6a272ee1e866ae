"""`/v1/completions` and `/v1/chat/completions` give the official client offline rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.server.openai.sampling_body import HARMLESS
from rollout.server.vllm.generate import HARMLESS_SAMPLING
from rollout.server.vllm.prompt_generate import OF_TEXT
from tests.helpers.loopback_hub import cached_snapshot
from tests.server.conftest import Live, client_of, joined_parts, post, run_server

PROMPT, IDS = "one two three", [7, 8, 9]
MESSAGES: list[Any] = [
    {"role": "system", "content": "one two"},
    {"role": "user", "content": "three four"},
]


def complete(live: Live, **asked: Any) -> Any:
    return client_of(live).completions.create(**{"model": live.serving.model_name} | asked)


def chat(live: Live, **asked: Any) -> Any:
    fields = {"model": live.serving.model_name, "messages": MESSAGES}
    return client_of(live).chat.completions.create(**fields | asked)


def test_a_completion_is_the_rollout(live: Live, offline: RolloutEngine) -> None:
    shared = {"seed": 5, "temperature": 0.9}
    (expected,) = offline.generate(
        [PROMPT], SamplingParams(**shared, max_new_tokens=24, ignore_eos=True, top_logprobs=3)
    )
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = complete(live, prompt=PROMPT, max_tokens=24, logprobs=3, extra_body=extra, **shared)
    (choice,) = answer.choices
    assert (choice.text, choice.token_ids) == (expected.text, expected.token_ids)
    assert choice.prompt_token_ids == IDS
    assert choice.finish_reason == "length"
    assert choice.weight_versions == [[0, 0, 24]]
    assert answer.system_fingerprint == "weights-0"
    assert answer.metadata == {
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": 24}],
    }
    # Equal, not close: a float passes through JSON unchanged
    assert choice.logprobs.token_logprobs == expected.logprobs
    for place, top in enumerate(choice.logprobs.top_logprobs):
        chosen = (expected.token_ids[place], expected.logprobs[place])
        wanted = {logprob for _, logprob in [chosen, *expected.extras.top_logprobs[place]]}
        assert set(top.values()) == wanted
    # Each token is where its text begins; the spaces are the tokens'
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].lstrip().startswith(token.lstrip())


def test_all_sampling_fields_arrive(live: Live, offline: RolloutEngine) -> None:
    openai_fields = {
        "seed": 11, "temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    }  # fmt: skip
    vllm_fields = {
        "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "stop_token_ids": [40],
    }  # fmt: skip
    params = SamplingParams(
        **openai_fields, **vllm_fields, logit_bias={12: 3.0, 13: -2.0}, min_new_tokens=3,
        max_new_tokens=40,
    )  # fmt: skip
    (expected,) = offline.generate([IDS], params)
    spelled = {"min_tokens": 3, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = complete(
        live, prompt=IDS, logit_bias={"12": 3, "13": -2}, max_tokens=40, logprobs=0,
        extra_body=vllm_fields | spelled, **openai_fields,
    )  # fmt: skip
    (choice,) = answer.choices
    assert choice.token_ids == expected.token_ids
    assert choice.finish_reason == str(expected.finish_reason)
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in expected.token_ids]
    assert choice.logprobs.token_logprobs == expected.logprobs
    assert [len(top) for top in choice.logprobs.top_logprobs] == [1] * len(expected.token_ids)


@pytest.mark.parametrize("prompts", [["one two", "three four five"], [[7, 8], [9, 10, 11]]])
def test_several_prompts_and_samples(live: Live, offline: RolloutEngine, prompts: Any) -> None:
    expected = offline.generate(prompts, SamplingParams(seed=3, n=3, max_new_tokens=8))
    answer = complete(live, prompt=prompts, n=3, best_of=3, seed=3, max_tokens=8)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [rollout.text for rollout in expected]
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == sum(len(rollout.token_ids) for rollout in expected)
    assert answer.usage.total_tokens == 5 + answer.usage.completion_tokens
    assert answer.usage.spec_verify_ct > 0


def test_the_defaults_are_openais(live: Live) -> None:
    """16 tokens of a completion, the whole context of a chat, another seed for each call."""
    free = {"ignore_eos": True}
    answers = [complete(live, prompt=IDS, extra_body=free) for _ in range(4)]
    assert {answer.usage.completion_tokens for answer in answers} == {16}
    assert len({answer.choices[0].text for answer in answers}) == 4
    long = chat(live, temperature=0, extra_body=free)
    assert long.usage.total_tokens == 512
    assert long.choices[0].finish_reason == "length"


@pytest.mark.parametrize("prompt", [PROMPT, IDS])
def test_echo_puts_the_prompt_first(live: Live, offline: RolloutEngine, prompt: Any) -> None:
    params = SamplingParams(seed=4, temperature=0.7, max_new_tokens=6, ignore_eos=True)
    (expected,) = offline.generate([prompt], params)
    of_prompt = offline.score(IDS[:1], IDS[1:], params)
    asked = {
        "prompt": prompt, "seed": 4, "temperature": 0.7, "max_tokens": 6, "echo": True,
        "logprobs": 1, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    (choice,) = complete(live, **asked).choices
    assert choice.text == PROMPT + expected.text
    assert choice.logprobs.token_logprobs == [None, *of_prompt, *expected.logprobs]
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.text_offset[:4] == [0, 3, 7, len(PROMPT)]
    streamed = joined_parts(complete(live, **asked, stream=True))[0]
    assert streamed["text"] == choice.text
    for name in ("token_logprobs", "text_offset"):
        joined = [each for part in streamed["logprobs"] for each in getattr(part, name)]
        assert joined == getattr(choice.logprobs, name)


def test_a_prompt_can_be_scored_alone(live: Live, offline: RolloutEngine) -> None:
    """Evaluation harnesses do this; generated tokens have the logprobs they were sampled with."""
    params = SamplingParams(seed=4, temperature=0.7, max_new_tokens=12, ignore_eos=True)
    (sampled,) = offline.generate([IDS], params)
    prompts = [[*IDS, *sampled.token_ids], [5]]
    answer = complete(live, prompt=prompts, temperature=0.7, max_tokens=0, echo=True, logprobs=0)
    scored, alone = answer.choices
    assert scored.logprobs.token_logprobs[len(IDS) :] == sampled.logprobs
    assert alone.logprobs.token_logprobs == [None]
    assert answer.usage.completion_tokens == 0
    assert scored.finish_reason == "length"


SAID_ONCE = ("id", "request_id", "created", "usage", "request_spec_decode_stats")
HARMLESS_BODIES = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 3, "seed": 1, "logprobs": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "seed": 1},
    "/inference/v1/generate": {
        "token_ids": [5, 6],
        "sampling_params": {"max_tokens": 3, "seed": 1, "logprobs": 1},
    },
    "/generate": {"prompt": {"prompt_token_ids": [5, 6]}, "max_tokens": 3, "seed": 1},
}


@pytest.mark.parametrize("path", HARMLESS_BODIES)
def test_fields_without_effect_change_nothing_that_is_answered(client: Any, path: str) -> None:
    body: Any = HARMLESS_BODIES[path]
    sampling = body.get("sampling_params", body)

    def answered(fields: dict[str, Any], of_sampling: bool) -> dict[str, Any]:
        sent = body | fields
        if of_sampling and sampling is not body:
            sent = body | {"sampling_params": sampling | fields}
        answer = post(client, path, **sent)
        return {name: value for name, value in answer.items() if name not in SAID_ONCE}

    plain = answered({}, of_sampling=False)
    names = {name: False for name in HARMLESS if path != "/generate"}
    if path == "/inference/v1/generate":
        names |= dict.fromkeys(HARMLESS_SAMPLING, True)
    if path == "/generate":
        names |= dict.fromkeys(HARMLESS_SAMPLING - OF_TEXT - {"skip_special_tokens"}, True)
    for name, of_sampling in names.items():
        for value in ("nonsense", True, False, 7, ["x"]):
            if isinstance(value, bool) or name != "parallel_tool_calls":  # chats declare it
                assert answered({name: value}, of_sampling) == plain, (name, value)


def test_vllms_and_sglangs_fields_have_their_effect(live: Live) -> None:
    def choice(**fields: Any) -> Any:
        free = {"ignore_eos": True} | fields
        answer = complete(live, prompt="one two", max_tokens=8, seed=4, extra_body=free)
        return answer.choices[0].model_dump()

    plain = choice(logprobs=1)
    assert choice(logprobs=True) == plain
    assert choice(logprobs=False)["logprobs"] is None
    words = plain["text"].split()
    stop = words[3]
    trimmed = choice(stop=[stop, "never"], return_token_ids=True)
    assert trimmed["finish_reason"] == "stop"
    assert trimmed["text"].split() == words[:3]
    assert len(trimmed["token_ids"]) == 4
    assert choice(stop=stop, no_stop_trim=True)["text"] == trimmed["text"] + stop
    ended = ("matched_stop", "stop_reason")
    assert [plain[name] for name in ended] == [None, None]
    assert [trimmed[name] for name in ended] == [stop, stop]
    by_pattern = choice(stop_regex=f"{stop}$")
    assert by_pattern["text"].split() == words[:4]
    assert [by_pattern[name] for name in ended] == [f"{stop}$"] * 2
    last = trimmed["token_ids"][-1]
    by_token = choice(stop_token_ids=[last])
    assert [by_token[name] for name in ended] == [last, last]


def test_a_models_own_end_is_matched_but_was_no_reason_asked_for(live: Live) -> None:
    eos = live.serving.encoder.tokenizer.eos_token_id
    asked: Any = {"max_tokens": 3, "logit_bias": {str(eos): 100}}
    (choice,) = chat(live, **asked).choices
    assert (choice.finish_reason, choice.matched_stop, choice.stop_reason) == ("stop", eos, None)
    for chunks in (
        chat(live, stream=True, **asked),
        complete(live, prompt=PROMPT, stream=True, extra_body={"return_token_ids": True}, **asked),
    ):
        parts = [part for chunk in chunks for part in chunk.choices]
        assert [part.matched_stop for part in parts] == [None] * (len(parts) - 1) + [eos]
        assert all(part.stop_reason is None for part in parts)


def test_a_chat_is_the_rollout(live: Live, offline: RolloutEngine) -> None:
    shared = {"seed": 6, "n": 2, "temperature": 0.8, "top_logprobs": 2}
    params = SamplingParams(**shared, max_new_tokens=20, ignore_eos=True)
    expected = offline.generate([MESSAGES], params)
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = chat(live, max_completion_tokens=20, logprobs=True, extra_body=extra, **shared)
    assert answer.prompt_token_ids == expected[0].prompt_ids
    assert answer.usage.prompt_tokens == len(expected[0].prompt_ids)
    assert answer.usage.completion_tokens == 40
    for choice, rollout in zip(answer.choices, expected, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", rollout.text)
        assert choice.token_ids == rollout.token_ids
        content = choice.logprobs.content
        assert [entry.logprob for entry in content] == rollout.logprobs
        tops = [[top.logprob for top in entry.top_logprobs] for entry in content]
        assert tops == [[logprob for _, logprob in top] for top in rollout.extras.top_logprobs]
        spelled = b"".join(bytes(entry.bytes) for entry in content).decode()
        assert "one" + spelled == offline.encoder.decode_with_specials([7, *rollout.token_ids])


def test_messages_become_the_prompt(live: Live, offline: RolloutEngine) -> None:
    parts = [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}]
    continued = [*MESSAGES, {"role": "assistant", "content": "five"}]
    rendered = "<system> one two <user> three four <assistant>"
    for messages, extra, prompt in (
        (MESSAGES, {}, rendered),
        ([MESSAGES[0], {"role": "user", "content": parts}], {}, rendered),
        (continued, {"continue_final_message": True}, f"{rendered} five"),
    ):
        extra |= {"return_token_ids": True}
        answer = chat(live, messages=messages, max_tokens=1, extra_body=extra)
        assert answer.prompt_token_ids == offline.encoder.encode(prompt)


def test_a_streamed_chat_begins_with_roles_and_ends_with_usage(
    live: Live, offline: RolloutEngine
) -> None:
    expected = offline.generate([MESSAGES], SamplingParams(seed=8, n=3, max_new_tokens=30))
    extra = {"return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": extra}
    chunks = list(chat(live, seed=8, n=3, max_tokens=30, logprobs=True, **options))
    for index, chunk in enumerate(chunks[:3]):
        (part,) = chunk.choices
        assert (part.index, part.delta.role, part.delta.content) == (index, "assistant", "")
    assert chunks[0].prompt_token_ids == expected[0].prompt_ids
    *others, last = chunks
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(rollout.token_ids) for rollout in expected)
    assert last.system_fingerprint == "weights-0"
    assert len({chunk.id for chunk in chunks}) == 1
    for index, choice in joined_parts(chunks).items():
        assert choice["text"] == expected[index].text
        assert choice["token_ids"] == expected[index].token_ids
        assert choice["finish_reason"] == str(expected[index].finish_reason)
        logprobs = [entry.logprob for part in choice["logprobs"] for entry in part.content]
        assert logprobs == expected[index].logprobs


def test_a_model_without_a_tokenizer_answers_in_ids(tiny_model_path: Path) -> None:
    with run_server(tiny_model_path, {"spec": "none"}, {}) as live:
        extra = {"return_token_ids": True}
        asked = {"prompt": IDS, "max_tokens": 4, "logprobs": 1, "seed": 1, "extra_body": extra}
        (choice,) = complete(live, **asked).choices
        assert choice.text == ""
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
        streamed = joined_parts(complete(live, **asked, stream=True))[0]
        assert (streamed["text"], streamed["token_ids"]) == ("", choice.token_ids)
        for refused in (lambda: complete(live, **asked | {"prompt": "one"}), lambda: chat(live)):
            with pytest.raises(openai.BadRequestError, match="tokenizer"):
                refused()


def test_models(live: Live) -> None:
    client = client_of(live)
    (model,) = client.models.list().data
    assert model.id == live.serving.model_name
    assert model.max_model_len == 512
    assert client.models.retrieve(model.id) == model


def test_a_model_of_the_hub_goes_by_its_name_there(text_model_path: Path, tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path, "someone/tiny", text_model_path)
    with run_server(snapshot, {"spec": "none"}, {}) as live, live.client() as client:
        assert [model.id for model in client_of(live).models.list().data] == ["someone/tiny"]
        for name in ("someone/tiny", "tiny"):
            assert complete(live, model=name, prompt=IDS, max_tokens=1).model == "someone/tiny"
        with pytest.raises(openai.NotFoundError):
            complete(live, model="someone/other", prompt=IDS)
        # Links into the cache, as those of the model's own folder are.
        post(client, "/update_weights_from_disk", model_path=str(snapshot))
