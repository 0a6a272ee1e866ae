import pytest

from rollout.engine.stopping import TokenStopCheck, cut_at_stop
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
