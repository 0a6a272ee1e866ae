import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.stop_regex import StopRegexes
from rollout.engine.stopping import TokenStopCheck, cut_at_stop
from rollout.errors import InvalidInputError
from rollout.types import FinishReason
from tests.helpers.requests import make_request

LETTERS = "abcdefghij"


def decode(token_ids):
    return "".join(LETTERS[t] for t in token_ids)


def request_with(output=(), **params):
    request = make_request([7, 7, *output], prompt_len=2, max_new_tokens=50, **params)
    request.stop_check = TokenStopCheck(params=request.params, eos_token_ids=(9,), decode=decode)
    return request


def first_stop(request, tokens):
    kept, reason = request.stop_check.first_stop(request, tokens)
    request.tokens += tokens[:kept]
    return kept, reason


def test_end_of_sequence_stops_unless_ignored():
    assert first_stop(request_with(), [1, 9, 2]) == (2, FinishReason.STOP)
    assert first_stop(request_with(ignore_eos=True), [1, 9, 2]) == (3, None)
    assert first_stop(request_with(stop_token_ids=[1, 10**30]), [0, 1]) == (2, FinishReason.STOP)


@pytest.mark.parametrize("cut", [0, 2, 4, 5, 6])
def test_stop_string_ends_at_the_token_that_completes_it_however_tokens_are_grouped(cut):
    tokens = [0, 1, 2, 3, 4, 5]  # a b c d e f
    request = request_with(stop=["cde"])
    first = request.stop_check.first_stop(request, tokens[:cut])
    assert first == first_stop(request, tokens[:cut])  # asking changes nothing
    if cut >= 5:
        assert first == (5, FinishReason.STOP)
    else:
        assert first == (cut, None)
        assert first_stop(request, tokens[cut:]) == (5 - cut, FinishReason.STOP)


@pytest.mark.parametrize("filler", [1, 2, 12])
def test_nothing_stops_before_the_minimum_nor_by_what_came_before_it(filler):
    minimum = filler + 1
    request = request_with(min_new_tokens=minimum, stop=["a"])
    assert first_stop(request, [0] + [3] * (filler - 1)) == (filler, None)
    assert first_stop(request, [3, 3]) == (2, None)
    assert first_stop(request, [3, 0]) == (2, FinishReason.STOP)
    assert first_stop(request_with(min_new_tokens=3), [9, 0, 9]) == (3, FinishReason.STOP)


def test_a_stop_string_may_span_the_cut_of_a_resubmitted_rollout_but_not_the_prompt():
    request = request_with([0, 1], stop=["abc", "ha"])
    request.prompt_len, request.partial_len = 4, 2
    assert first_stop(request, [2, 3]) == (1, FinishReason.STOP)
    assert first_stop(request_with(stop=["ha"]), [0]) == (1, None)


def test_text_is_cut_before_the_stop_string_that_ended_it():
    assert cut_at_stop("aabzz", len("aabz"), ["zz", "b"]) == "aab"
    assert cut_at_stop("abab", len("aba"), ["ab"]) == "ab"
    assert cut_at_stop("ab c", len("ab "), ["ab"]) == "ab c"


TOKENS = ["a", "b", "c", "d", " ", ".", "\n", "é", "\N{PILE OF POO}"]


class Pieces:
    """A tokenizer of whole texts, and of one character in two tokens."""

    clean_up_tokenization_spaces = False
    all_special_ids = ()
    added_tokens_decoder = {}  # noqa: RUF012

    def decode(self, ids, skip_special_tokens=False):
        return decode_pieces(ids)

    def convert_tokens_to_ids(self, names):
        return [None] * len(names)

    def convert_ids_to_tokens(self, ids):
        return []


HALVES = (len(TOKENS), len(TOKENS) + 1)  # of an e with an acute accent


def decode_pieces(ids):
    halves = [bytes([byte]) for byte in "é".encode()]
    pieces = [*(token.encode() for token in TOKENS), *halves]
    return b"".join(pieces[id] for id in ids).decode(errors="replace")


def regex_request(patterns, output=(), **params):
    request = make_request(
        [0, 1, *output], prompt_len=2, max_new_tokens=99, stop_regex=patterns, **params
    )
    request.stop_check = TokenStopCheck(
        params=request.params,
        eos_token_ids=(5,),
        decode=decode_pieces,
        regex=StopRegexes(Pieces()).open(request.params),
    )
    return request


PATTERNS = ["ab", "c+$", "é", "[a-c] d", r"(?s)a.*b\n$", "zz", "^b", "x*"]


@given(
    st.lists(st.integers(0, HALVES[1]), min_size=1, max_size=40),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
    st.integers(0, 12),
    st.integers(1, 7),
)
def test_a_pattern_ends_an_output_where_its_text_first_ends_in_a_match(
    tokens, patterns, minimum, size
):
    def completed(count):
        """The patterns of which a match ends in what token ``count`` brings or changes."""
        before, after = (decode_pieces(tokens[:n]) for n in (count - 1, count))
        ends = range(len(before.rstrip("\N{REPLACEMENT CHARACTER}")) + 1, len(after) + 1)
        return [
            pattern
            for pattern in patterns
            if any(
                re.compile(pattern).fullmatch(after, start, end)
                for end in (ends[-1:] if pattern.endswith("$") else ends)
                for start in range(end + 1)
            )
        ]

    first = max(1, minimum)
    expected = next((n for n in range(first, len(tokens) + 1) if completed(n)), None)
    request = regex_request(patterns, min_new_tokens=minimum, ignore_eos=True)
    num_emitted, reason = 0, None
    while reason is None and num_emitted < len(tokens):
        part = tokens[num_emitted : num_emitted + size]
        asked = request.stop_check.first_stop(request, part)
        kept, reason = first_stop(request, part)
        assert asked == (kept, reason)
        num_emitted += kept
    assert (num_emitted if reason else None) == expected
    if expected is not None:
        assert request.stop_check.matched(request) == completed(expected)[0]


def test_a_pattern_is_told_unless_a_token_or_a_string_ended_the_output():
    request = regex_request(["b|\\."], stop=["b"])
    assert first_stop(request, [0, 1, 2]) == (2, FinishReason.STOP)
    assert request.stop_check.matched(request) == "b"
    request = regex_request(["b|\\."])
    assert first_stop(request, [0, 5, 2]) == (2, FinishReason.STOP)
    assert request.stop_check.matched(request) == 5


def test_a_match_may_be_long_and_begin_in_a_resubmitted_rollout_but_not_in_the_prompt():
    request = regex_request(["(?s)^ab.*d"], [0, 1, *[2] * 5000])
    request.partial_len = request.prompt_len = 2
    assert first_stop(request, [2, 3, 2]) == (2, FinishReason.STOP)
    assert first_stop(regex_request(["abc"]), [2]) == (1, None)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing )"),
        (r"(a)\1", "no backreferences"),
        ("(?=a)", "no lookaround"),
        ("a[ab]{900}c", "too large"),
        ("a)(b", "unexpected )"),
        ("\ud800", "surrogates"),
    ],
)
def test_a_pattern_that_cannot_be_searched_in_time_is_refused_by_name(pattern, reason):
    with pytest.raises(InvalidInputError, match=re.escape(reason)) as refused:
        regex_request([pattern])
    assert refused.value.field == "sampling.stop_regex"
    assert refused.value.value == pattern
