"""Wrong arguments are refused by name, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from ngram_native import Corpus
from tests.native.drafts import extend, i32, i64

ONE = i64([1])
BOTH = i64([1, 2])
REFUSED = [  # call, what the message says
    (lambda c: c.insert(i32([5, -7])), r"tokens\[1\]=-7"),
    (lambda c: c.insert(i32([3, 10])), r"tokens\[1\]=10: must be below vocab_size=10"),
    (lambda c: c.insert(i64([5])), "tokens=<array of int64>.*int32"),
    (lambda c: c.insert(np.zeros((2, 2), np.int32)), r"tokens=.*\(2, 2\)"),
    (lambda c: c.insert(i32([5]), group=1.5), "group=1.5"),
    (lambda c: c.insert(i32([5]), group=2**64), "group="),
    (lambda c: c.open(1, 0, i32([5])), "sequence_id=1: is open already"),
    (lambda c: c.open(3, 0, i32([3, 10])), r"tokens\[1\]=10"),
    (lambda c: c.close(9), "sequence_id=9: is not open"),
    (lambda c: extend(c, {1: [], 9: [5]}), "sequence_id=9"),
    (lambda c: c.extend(i64([1, 1]), i32([5]), i64([0, 1, 1])), "sequence_ids=1: is named twice"),
    (lambda c: extend(c, {1: [3, 10]}), r"tokens\[1\]=10"),
    (lambda c: c.extend(i32([1]), i32([5]), i64([0, 1])), "sequence_ids=<array of int32>"),
    (lambda c: c.extend(ONE, i32([5]), i64([0])), r"len\(offsets\)=1"),
    (lambda c: c.extend(ONE, i32([5]), i64([1, 1])), r"offsets\[0\]=1"),
    (lambda c: c.extend(ONE, i32([5]), i64([0, 2])), r"offsets\[-1\]=2"),
    (lambda c: c.extend(BOTH, i32([5]), i64([0, 2, 1])), r"offsets\[2\]=1"),
    (lambda c: extend(c, {1: [], 2: [5]}, [0, 1]), r"verified\[1\]=1: must be in \[0, 0\]"),
    (lambda c: extend(c, {1: [5]}, [-1]), r"verified\[0\]=-1"),
    (lambda c: extend(c, {1: [5]}, []), r"len\(verified\)=0: must be len\(sequence_ids\)=1"),
    (lambda c: c.propose(i64([8]), i32([1]), 0.0), "sequence_id=8"),
    (lambda c: c.propose(i64([1, 1]), i32([1, 1]), 0.0), "sequence_ids=1: is named twice"),
    (lambda c: c.propose(ONE, i32([64]), 0.0), r"budgets\[0\]=64.*63"),
    (lambda c: c.propose(ONE, i32([-1]), 0.0), r"budgets\[0\]=-1"),
    (lambda c: c.propose(ONE, i32(), 0.0), r"len\(budgets\)=0"),
    (lambda c: c.propose(ONE, i32([1]), 1.5), "min_probability=1.5"),
    (lambda c: c.query(0, i32([1]), 64, 0.0), "budget=64"),
    (lambda c: c.query(0, i32([3, 10]), 8, 0.0), r"tokens\[1\]=10"),
    (lambda c: c.add_external("x", [i32([1]), i32([1, -1])]), "tokens"),
    (lambda c: [c.add_external("y", []) for _ in range(2)], "name='y'"),
    (lambda c: c.add_external("big", [np.zeros(100_000, np.int32)]), "max_external_bytes"),
    (lambda c: c.publish_external("x", c.external_builder()), "builder=not"),
    (lambda c: c.remove_external("x"), "name='x'"),
    (lambda c: c.set_weight_version("3"), "version='3'"),
]


def test_a_wrong_call_is_refused_by_name():
    corpus = Corpus(max_bytes=1 << 20, max_external_bytes=1 << 20, vocab_size=10)
    corpus.open(1, 0, i32([1, 2, 3]))
    corpus.open(2, 0, i32([1, 2, 4]))
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            call(corpus)
        assert corpus.num_tokens == 4, message
    corpus.check_integrity()


def test_a_wrong_option_is_refused_by_name():
    for options, message in (
        ({"max_bytes": 1}, "max_bytes=1"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"max_bytes": 1e9}, "max_bytes"),
        ({"max_candidates": 0}, "max_candidates=0"),
        ({"max_candidates": 8, "max_steps": 7}, "max_steps=7"),
        ({"max_external_bytes": -1}, "max_external_bytes=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            Corpus(**options)


def test_strided_arrays_are_taken_as_they_read():
    corpus = Corpus(max_bytes=1 << 20)
    corpus.insert(i32([9, 8, 7, 6, 5])[::-1])
    assert corpus.query(0, i32([5, 6]), 8, 0.0).tokens_N.tolist() == [7, 8, 9]
