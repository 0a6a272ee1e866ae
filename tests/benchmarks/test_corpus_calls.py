"""The prepared calls carry the documents, whole and in order."""

from __future__ import annotations

import itertools

import numpy as np
from corpus_calls import documents_of, interleave, num_tokens
from harness.traces import synthetic_trace


def test_interleaved_documents_come_out_whole():
    trace = synthetic_trace()
    documents = list(itertools.islice(documents_of([trace]), 40))
    calls = interleave(documents, num_tokens=10**9, active=5)
    assert all(len(call.ids_B) == 5 for call in calls)
    got: dict[int, list[int]] = {}
    opened = {}
    for call in calls:
        for sequence_id in call.closed:
            assert got[sequence_id] == opened[sequence_id].tokens.tolist()
            del opened[sequence_id]
        opened.update(call.opened)
        counts_B = np.diff(call.offsets_B1)
        assert counts_B.min() >= 1
        assert counts_B.max() <= 4
        parts = np.split(call.tokens_N, call.offsets_B1[1:-1])
        for sequence_id, tokens in zip(call.ids_B.tolist(), parts, strict=True):
            assert sequence_id in opened
            got.setdefault(sequence_id, []).extend(tokens.tolist())
    assert len(opened) == 5
    assert sum(map(len, got.values())) == num_tokens(calls)


def test_each_round_of_a_trace_has_its_own_groups():
    trace = synthetic_trace()
    first_round, second_round = _rounds(trace)
    assert not first_round & second_round
    assert len(first_round) == len(second_round) == len(trace.prompts)


def _rounds(trace):
    count = len(trace.responses)
    groups = [document.group for document in itertools.islice(documents_of([trace]), 2 * count)]
    return set(groups[:count]), set(groups[count:])
