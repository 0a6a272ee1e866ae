"""A stream after a failed step, or one that its reader leaves. Order: test_stream_order.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout.engine.streaming import in_order_of_plain_decoding
from rollout.types import FinishReason


def request(request_id, length):
    return SimpleNamespace(request_id=request_id, tokens=[0] * (2 + length), prompt_len=2)


def rollout(request_id, length):
    return SimpleNamespace(
        request_id=request_id, token_ids=[0] * length, finish_reason=FinishReason.STOP
    )


def test_what_was_held_back_comes_before_the_error():
    requests = [request(7, 1), request(8, 5), request(9, 3)]

    def steps():
        yield [rollout(8, 5), rollout(9, 3)]  # 7 may still end before both
        raise RuntimeError("the step failed")

    stream = in_order_of_plain_decoding(requests, 3, steps())
    assert [next(stream).request_id, next(stream).request_id] == [8, 9]
    with pytest.raises(RuntimeError, match="the step failed"):
        next(stream)


def test_whoever_leaves_early_gets_no_more():
    requests = [request(0, 2), request(1, 9)]
    stream = in_order_of_plain_decoding(requests, 2, iter([[rollout(0, 2)], [rollout(1, 9)]]))
    assert next(stream).request_id == 0
    stream.close()
    assert list(stream) == []


def test_steps_run_while_an_aborted_one_is_handed_out_change_nothing():
    _, second, _ = requests = [request(0, 6), request(1, 5), request(2, 6)]
    aborted = rollout(0, 6)
    aborted.finish_reason = FinishReason.ABORT

    def steps():
        yield [aborted, rollout(2, 6)]
        yield [rollout(1, 6)]

    stream = in_order_of_plain_decoding(requests, 3, steps())
    assert next(stream).request_id == 0
    second.tokens.append(0)  # it ended meanwhile, with the third: it arrived before that
    assert [each.request_id for each in stream] == [1, 2]
