"""Streams show the texts of rollouts, and never half a character or a stop string."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from rollout import RolloutEngine, SamplingParams
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.held_engine import held
from tests.helpers.text_model import save_byte_model
from tests.server.conftest import Live, client_of, joined_parts, post, run_server


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


def create(live: Live, **asked: Any) -> Any:
    return client_of(live).completions.create(
        **{"model": live.serving.model_name, "prompt": "x"} | asked
    )


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "other"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def test_outputs_obey_a_grammar_in_every_dialect(live: Live) -> None:
    pytest.importorskip("llguidance")
    objects = re.compile(r'\{"a":"(one|other)","b":(true|false)\}')
    chosen = re.compile(r'\[1, 2\]|\{"a": "\(\.\*\)"\}')
    for asked, pattern in (
        ({"response_format": NAMED}, objects),
        ({"extra_body": {"structured_outputs": {"json": json.dumps(SCHEMA)}}}, objects),
        ({"extra_body": {"guided_choice": ["[1, 2]", '{"a": "(.*)"}']}}, chosen),
    ):
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
            # The model's end is a character
            assert pattern.fullmatch(choice["text"][:-1]), choice["text"]
    sampling = {"regex": "(ab|c){3}-d", "max_new_tokens": 20}
    with live.client() as client:
        answer = post(client, "/generate", text="x", sampling_params=sampling)
        assert re.fullmatch("(ab|c){3}-d", answer["text"])
        grammar = 'root ::= ("ab" | "c"){3} "-d"'
        sampling = {"ebnf": grammar, "max_new_tokens": 20}
        answer = post(client, "/generate", text="x", sampling_params=sampling)
        assert re.fullmatch("(ab|c){3}-d", answer["text"])
        for fields in ({"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}):
            answer = post(client, "/v1/completions", prompt="x", max_tokens=20, **fields)
            assert answer["choices"][0]["text"].startswith(("ab", "c"))


def test_each_grammar_of_a_call_is_compiled_before_it_is_queued(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    compile_grammar, compiled = live.serving._compile_grammar, []

    def watched(params: SamplingParams) -> None:
        compiled.append((params.ebnf, params.stop_regex))
        compile_grammar(params)

    monkeypatch.setattr(live.serving, "_compile_grammar", watched)
    each = [{"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "b"'}, {"stop_regex": "c"}]
    with live.client() as client:
        sampling = [{"max_new_tokens": 1, **fields} for fields in each]
        post(client, "/generate", text=["x"] * 3, sampling_params=sampling)
    assert compiled == [('root ::= "a"', []), ('root ::= "b"', []), (None, ["c"])]


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
    assert "stop" in {str(rollout.finish_reason) for rollout in expected}
    biases: Any = {str(token): value for token, value in bias.items()}
    shown = dict.fromkeys(range(16), "")
    for chunk in create(
        live, n=16, seed=2, max_tokens=120, stop=stop, logit_bias=biases, stream=True
    ):
        (part,) = chunk.choices
        shown[part.index] += part.text
        text = expected[part.index].text
        assert text is not None
        assert text.startswith(shown[part.index]), "what was shown is taken back"
    assert list(shown.values()) == [rollout.text for rollout in expected]


ENDLESS = {"max_tokens": 500, "stream": True, "extra_body": {"ignore_eos": True}}


def test_an_error_in_mid_stream_is_an_error_of_the_client(byte_model_path: Path) -> None:
    def break_down(engine: RolloutEngine) -> None:
        def step(batch: object) -> None:
            raise RuntimeError("a broken machine")

        engine.worker.step = step

    with run_server(byte_model_path, {"spec": "none"}, {}, breaks=True) as live:
        with held(live.serving.loop):
            stream = create(live, **ENDLESS)
            next(stream)
            live.serving.loop.call(break_down).result(HANG_SECONDS)
        with pytest.raises(openai.APIError, match="the engine loop is broken"):
            list(stream)
