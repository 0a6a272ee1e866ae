"""Streams: the same text as without, no half of a character or of a stop string, nobody waits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from rollout import RolloutEngine, SamplingParams
from rollout.types import Rollout
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.held_engine import held
from tests.helpers.text_model import save_byte_model
from tests.server.conftest import Live, run_server
from tests.server.openai_clients import async_client_of, client_of, joined_parts


@pytest.fixture(scope="module")
def byte_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("byte-model"), max_positions=512)


@pytest.fixture(scope="module")
def live(byte_model_path: Path) -> Iterator[Live]:
    with run_server(byte_model_path, {}, {}) as live:
        yield live


@pytest.fixture(scope="module")
def offline(byte_model_path: Path) -> RolloutEngine:
    return RolloutEngine.from_pretrained(byte_model_path, "none")


def streamed(live: Live, **asked: Any) -> dict[int, dict[str, Any]]:
    return joined_parts(
        client_of(live).completions.create(
            **{"model": live.serving.model_name, "stream": True, **asked}
        )
    )


def test_streams_have_the_texts_of_whole_answers(live: Live, offline: RolloutEngine) -> None:
    prompts = ["héllo wörld", "日本語 🙂"]
    params = SamplingParams(seed=1, n=3, max_new_tokens=60, temperature=0.8)
    expected = offline.generate(prompts, params)
    assert any("\ufffd" in (rollout.text or "") for rollout in expected)
    choices = streamed(
        live,
        prompt=prompts,
        n=3,
        seed=1,
        max_tokens=60,
        temperature=0.8,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    assert len(choices) == 6
    for index, rollout in enumerate(expected):
        choice = choices[index]
        assert choice["text"] == rollout.text
        assert choice["token_ids"] == rollout.token_ids
        assert [
            logprob for part in choice["logprobs"] for logprob in part.token_logprobs
        ] == rollout.logprobs
        assert choice["finish_reason"] == str(rollout.finish_reason)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "other"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize(
    "asked",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"extra_body": {"structured_outputs": {"json": json.dumps(SCHEMA)}}},
        {"extra_body": {"guided_choice": ["[1, 2]", '{"a": "(.*)"}']}},
    ],
)
def test_outputs_obey_a_grammar(live: Live, asked: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    chunks = client_of(live).chat.completions.create(
        model=live.serving.model_name,
        messages=[{"role": "user", "content": "hi"}],
        n=4,
        max_tokens=80,
        stream=True,
        **asked,
    )
    for choice in joined_parts(chunks).values():
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["text"][:-1])  # the model's end is a character
        assert value in ([1, 2], {"a": "(.*)"}) or (
            value["a"] in ("one", "other") and value["b"] in (False, True)
        )


def test_sglangs_dialect_has_grammars_too(live: Live) -> None:
    pytest.importorskip("llguidance")
    body = {"text": "x", "sampling_params": {"regex": "(ab|c){3}-d", "max_new_tokens": 20}}
    with live.client() as client:
        answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch("(ab|c){3}-d", answer.json()["text"])


def favouring(text: str) -> dict[int, float]:
    """A bias that makes the bytes of this text likely."""
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {piece for word, _ in level.pre_tokenize_str(text) for piece in word}
    first_id = 2  # after the special tokens
    return {first_id + sorted(ByteLevel.alphabet()).index(piece): 12.0 for piece in pieces}


def test_stop_strings_are_not_leaked(live: Live, offline: RolloutEngine) -> None:
    """Many samples are written with a few letters, so that stops come late, half and whole."""
    stop, bias = ["abba", "é!"], favouring("abé!")
    params = SamplingParams(seed=2, n=16, max_new_tokens=120, stop=stop, logit_bias=bias)
    expected = offline.generate(["x"], params)
    reasons = {str(rollout.finish_reason) for rollout in expected}
    assert "stop" in reasons
    chunks = client_of(live).completions.create(
        model=live.serving.model_name,
        prompt="x",
        n=16,
        seed=2,
        max_tokens=120,
        stop=stop,
        logit_bias={str(token): value for token, value in bias.items()},
        stream=True,
    )
    shown = dict.fromkeys(range(16), "")
    for chunk in chunks:
        (part,) = chunk.choices
        shown[part.index] += part.text
        text = expected[part.index].text
        assert text is not None
        assert text.startswith(shown[part.index]), "what was shown is taken back"
    assert list(shown.values()) == [rollout.text for rollout in expected]


@pytest.mark.parametrize("skips", [True, False])
def test_texts_may_show_what_ended_them(live: Live, offline: RolloutEngine, skips: bool) -> None:
    stop, bias = ["abb", "bba"], favouring("ab") | {1: 9.0}
    params = SamplingParams(
        seed=3, n=8, max_new_tokens=60, stop=stop, logit_bias=bias, ignore_eos=True
    )
    expected = []
    for rollout in offline.generate(["x"], params):
        text = offline.encoder.tokenizer.decode(rollout.token_ids, skip_special_tokens=skips)
        ends = [text.find(each) + 3 for each in stop if each in text]
        assert ends, "each of them is to end by a stop string"
        expected.append(text[: min(ends)] if skips else text)
    asked = {
        "model": live.serving.model_name,
        "prompt": "x",
        "n": 8,
        "seed": 3,
        "max_tokens": 60,
        "stop": stop,
        "logit_bias": {str(token): value for token, value in bias.items()},
        "extra_body": {
            "ignore_eos": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": skips,
        },
    }
    whole = client_of(live).completions.create(**asked)
    assert [choice.text for choice in whole.choices] == expected
    assert any("</s>" in text for text in expected) is not skips
    parts = joined_parts(client_of(live).completions.create(**asked, stream=True))
    assert [parts[index]["text"] for index in range(8)] == expected


def test_many_clients_at_once_get_their_own_tokens(live: Live, offline: RolloutEngine) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=live.serving.model_name,
            messages=[{"role": "user", "content": "hi"}],
            seed=seed,
            max_tokens=40,
            stream=True,
        )
        return joined_parts([chunk async for chunk in stream])[0]["text"]

    async def ask_all() -> list[str]:
        async with async_client_of(live) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(24)))

    prompts = [[{"role": "user", "content": "hi"}]] * 24
    params = [SamplingParams(seed=seed, max_new_tokens=40) for seed in range(24)]
    expected: list[Rollout] = []
    for prompt, own in zip(prompts, params, strict=True):
        expected += offline.generate([prompt], own)
    assert asyncio.run(ask_all()) == [rollout.text for rollout in expected]


def test_an_aborted_request_says_so(live: Live) -> None:
    with held(live.serving.loop):
        stream = client_of(live).completions.create(
            model=live.serving.model_name,
            prompt="x",
            max_tokens=500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = [next(stream)]
        live.serving.loop.abort_all().result(HANG_SECONDS)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "abort"


def test_an_error_in_mid_stream_is_an_error_of_the_client(byte_model_path: Path) -> None:
    with pytest.raises(openai.APIError, match="the engine loop is broken"):
        stream_until_the_engine_breaks(byte_model_path)


def stream_until_the_engine_breaks(model: Path) -> None:
    def break_down(engine: RolloutEngine) -> None:
        def step(batch: object) -> None:
            raise RuntimeError("a broken machine")

        engine.worker.begin_step = step

    with run_server(model, {"spec": "none"}, {}) as live, held(live.serving.loop, after=50):
        stream = client_of(live).completions.create(
            model=live.serving.model_name, prompt="x", max_tokens=500, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(stream)
        live.serving.loop.call(break_down).result(HANG_SECONDS)
        list(stream)
