from rollout.stopping import TokenStopCheck, cut_at_stop
from rollout.types import FinishReason, SamplingParams

LETTERS = "abcdefghij"


def decode(token_ids):
    return "".join(LETTERS[t] for t in token_ids)


def check(**params):
    return TokenStopCheck(
        params=SamplingParams(max_new_tokens=50, **params), eos_token_ids=(9,), decode=decode
    )


def test_end_of_sequence_stops_unless_ignored():
    assert check().first_stop([1, 9, 2]) == (2, FinishReason.STOP)
    assert check(ignore_eos=True).first_stop([1, 9, 2]) == (3, None)
    assert check(stop_token_ids=[1]).first_stop([0, 1]) == (2, FinishReason.STOP)


def test_stop_string_ends_at_the_token_that_completes_it_however_tokens_are_grouped():
    tokens = [0, 1, 2, 3, 4, 5]  # a b c d e f
    for cut in range(len(tokens) + 1):
        stop = check(stop=["cde"])
        first = stop.first_stop(tokens[:cut])
        if cut >= 5:
            assert first == (5, FinishReason.STOP)
        else:
            assert first == (cut, None)
            assert stop.first_stop(tokens[cut:]) == (5 - cut, FinishReason.STOP)


def test_nothing_stops_before_the_minimum():
    stop = check(min_new_tokens=3, stop=["a"])
    assert stop.first_stop([9, 0]) == (2, None)
    assert stop.first_stop([9]) == (1, FinishReason.STOP)


def test_a_stop_string_may_span_the_cut_of_a_resubmitted_rollout():
    params = SamplingParams(stop=["abc"])
    stop = TokenStopCheck(params=params, eos_token_ids=(), decode=decode, generated=[0, 1])
    assert stop.first_stop([2, 3]) == (1, FinishReason.STOP)


def test_text_is_cut_before_the_first_stop_string():
    params = SamplingParams(stop=["zz", "b"])
    assert cut_at_stop("aabzz", params) == "aa"
    assert cut_at_stop("aa", params) == "aa"
