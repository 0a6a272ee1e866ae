"""Outputs that obey a grammar: whatever is drafted, and beside requests without one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rollout import InvalidInputError, Rollout, RolloutEngine, SamplingParams
from rollout.types import FinishReason
from tests.helpers.compared import numbers
from tests.helpers.text_model import save_byte_model

pytest.importorskip("llguidance")

REGEX = r"(ab|abc|é){2,5}-[0-9]{3}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["one", "other"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["kind", "flags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GBNF = """root ::= "(" word "," word ("," word){1,3} ")"
word ::= "ab" | "abc" | [0-9]"""
OBEDIENT = {"regex": REGEX}, {"json_schema": json.dumps(SCHEMA)}, {"ebnf": GBNF}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_byte_model(tmp_path_factory.mktemp("byte-model"), max_positions=256)


@pytest.fixture(scope="module")
def engine(model):
    options = {"budget": "fixed", "min_probability": 0.0}  # else times decide whether it drafts
    return RolloutEngine.from_pretrained(model, "ngram", spec_options=options, max_running=8)


@pytest.fixture(scope="module")
def plain(model):
    return RolloutEngine.from_pretrained(model, "none", max_running=8)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"n": 4, "seed": 3, "max_new_tokens": 80, **fields})


def rest_of(engine: RolloutEngine, whole: Rollout, asked: SamplingParams, cut: int) -> list[int]:
    """The tokens with which a rollout goes on that was cut."""
    partial = whole.token_ids[:cut]
    engine.submit(whole.prompt_ids, asked, partial_ids=partial, request_seed=whole.seed)
    rest: list[Rollout] = []
    while engine.has_unfinished:
        rest += engine.step()
    return rest[0].token_ids


def test_outputs_obey_with_drafts_as_without(engine, plain):
    """Twice, so that the second time the corpus knows the outputs and drafts are accepted."""
    prompts = ["x", "x", "yz", "x"]
    asked = [
        params(regex=REGEX), params(temperature=0.8), params(**OBEDIENT[1], top_p=0.9),
        params(ebnf=GBNF),
    ]  # fmt: skip
    expected = plain.generate(prompts, asked)
    for _ in range(2):
        rollouts = engine.generate(prompts, asked)
        assert numbers(rollouts) == numbers(expected)
    assert sum(rollout.stats.accepted for rollout in rollouts[:4]) > 0
    assert sum(rollout.stats.accepted for rollout in rollouts[8:12]) > 0
    texts = [engine.encoder.decode(rollout.token_ids[:-1]) for rollout in rollouts]  # but the end
    for text, rollout in zip(texts[:4], rollouts, strict=False):
        assert re.fullmatch(REGEX, text)
        assert rollout.finish_reason is FinishReason.STOP
    for text in texts[12:]:
        assert re.fullmatch(r"\((ab|abc|[0-9])(,(ab|abc|[0-9])){2,4}\)", text)
    for text in texts[8:12]:
        value = json.loads(text)
        assert value["kind"] in ("one", "other")
        assert 2 <= len(value["flags"]) <= 3


@pytest.mark.parametrize("after", ["e", "é"], ids=["a token", "several"])
def test_a_grammar_that_begins_after_a_text(engine, plain, after):
    """What comes before is free, as reasoning is; drafts that lead across it change nothing."""
    letters = [*engine.encoder.encode_word(after + "x-abcé0123456789"), *engine.eos_token_ids]
    asked = params(
        regex=REGEX, grammar_after=after, allowed_token_ids=letters, temperature=3.0,
        logit_bias=dict.fromkeys(engine.encoder.encode_word("é"), 6.0),
        max_new_tokens=240, n=6,
    )  # fmt: skip
    expected = plain.generate(["x"], asked)
    for _ in range(2):
        rollouts = engine.generate(["x"], asked)
        assert numbers(rollouts) == numbers(expected)
    assert sum(rollout.stats.accepted for rollout in rollouts) > 0
    whole = [
        engine.encoder.decode(each.token_ids[:-1])
        for each in rollouts
        if each.finish_reason is FinishReason.STOP
        and after in engine.encoder.decode(each.token_ids)
    ]
    assert whole
    for text in whole:
        assert re.fullmatch(REGEX, text.partition(after)[2])
    (first, *_) = [each for each in rollouts if len(each.token_ids) > 6]
    for cut in (2, 5):
        assert rest_of(engine, first, asked, cut) == first.token_ids[cut:]


def test_a_rollout_that_was_cut_goes_on_and_its_logprobs_are_those_of_no_grammar(engine):
    """Logprobs count forbidden tokens too, because trainers recompute them so."""
    for fields in OBEDIENT:
        asked = params(n=1, temperature=0.7, **fields)
        (whole,) = engine.generate(["x"], asked)
        assert rest_of(engine, whole, asked, 5) == whole.token_ids[5:]
        plain = SamplingParams(temperature=0.7)
        assert whole.logprobs == engine.score(whole.prompt_ids, whole.token_ids, plain)


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("regex", {"regex": "(a"}),
    ("regex", {"regex": 1}),
    ("ebnf", {"ebnf": "root ::= (a"}),
    ("ebnf", {"ebnf": "root ::= nothing"}),
    ("ebnf", {"ebnf": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000}),
    ("ebnf", {"ebnf": GBNF, "regex": "a"}),
    ("regex", {"regex": r"[^\x00-\x{10FFFF}]"}),  # no text obeys it
    ("regex", {"regex": "a", "json_schema": "{}"}),
    ("regex", {"regex": "a" * 70_000}),
    ("json_schema", {"json_schema": "{"}),
    ("json_schema", {"json_schema": '{"type": "nothing"}'}),
    ("json_schema", {"json_schema": "[" * 100_000}),
    # What would be compiled for hours, while all other requests wait:
    ("json_schema", {"json_schema": '{"items": {"type": "number", "multipleOf": 10.0003}}'}),
    ("json_schema", {"json_schema": '{"type": "integer", "multipleOf": 1e99999999}'}),
    ("json_schema", {"json_schema": '{"multipleOf": 1e99999999999999999999}'}),
    ("json_schema", {"json_schema": '{"allOf": [{"multipleOf": 211}, {"multipleOf": 499}]}'}),
    ("grammar_after", {"grammar_after": "a"}),
    ("grammar_after", {"grammar_after": "", "regex": "a"}),
    ("ignore_eos", {"regex": "a", "ignore_eos": True}),
    ("min_new_tokens", {"regex": "a", "min_new_tokens": 2}),
)


def test_what_is_no_grammar_or_takes_long_to_compile_is_named(engine):
    for field, fields in REFUSED:
        with pytest.raises(InvalidInputError) as refused:
            engine.generate(["x"], params(**fields))
        assert refused.value.field == f"sampling.{field}", fields
    with pytest.raises(InvalidInputError, match="must obey the request's regex"):
        engine.submit([5], params(n=1, regex=REGEX), partial_ids=[5, 5, 5])
    assert not engine.has_unfinished
    usual = {"type": "number", "multipleOf": 0.01, "maximum": 99, "minimum": -99}
    properties = {"usual": usual, "even": {"type": "integer", "multipleOf": 1000}}
    asked = params(n=1, json_schema=json.dumps({"properties": properties}), max_new_tokens=4)
    assert engine.generate(["x"], asked)[0].finish_reason is not FinishReason.ERROR


def test_a_request_whose_grammar_fails_ends_alone(engine, monkeypatch):
    """The second token is one too many for this grammar's limits."""
    from llguidance import LLMatcher, LLParserLimits

    known = engine.requests.grammars
    tokens = known._tokens("regex", REGEX)
    grammar = LLMatcher.grammar_from_lark('start: "a" rest\nrest: ("b" | "c") rest | "d"')
    limits = LLParserLimits(step_max_items=12)
    matcher = LLMatcher(tokens, grammar, limits=limits, log_level=0)
    monkeypatch.setitem(known._compiled, ("regex", "fails"), matcher)
    failed, other = engine.generate(["x", "y"], [params(n=1, regex="fails"), params(n=1)])
    assert failed.finish_reason is FinishReason.ERROR
    assert "the grammar has become too complex" in (failed.error or "")
    assert other.finish_reason is not FinishReason.ERROR
