"""A draft that is accepted much less since a weight update is warned about."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollout import SamplingParams
from rollout.engine.accept_lengths import _ROWS, AcceptLengths
from rollout.types import EntryResult, StepResult

PARTS = {"target": None, "draft": None}


def observe(lengths: AcceptLengths, accepted: float, temperature: float = 1.0, rows=_ROWS) -> None:
    """Steps of ten rows, each with five draft tokens, and of one row without."""
    request = SimpleNamespace(params=SamplingParams(temperature=temperature))
    batch = SimpleNamespace(entries=[SimpleNamespace(request=request)] * 11)
    paths = [int(accepted * (i + 1)) - int(accepted * i) for i in range(10)]
    entries = [EntryResult(num_drafted=5, path=[1] * path) for path in paths]
    result = StepResult(entries=[*entries, EntryResult()], weight_version=0)
    for _ in range(rows // 10):
        lengths.observe(batch, result)


@pytest.fixture
def warnings(caplog):
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_fall_by_half_is_warned_about_once_an_update(warnings):
    lengths = AcceptLengths(PARTS)
    observe(lengths, 1.0)
    lengths.begin(1)
    observe(lengths, 0.6)
    assert not warnings()
    lengths.begin(2)
    observe(lengths, 0.2, rows=_ROWS - 10)
    assert not warnings(), "too few rows"
    observe(lengths, 0.2)
    (warning,) = warnings()
    assert "since weight version 2 the accept length of drafts is 1.20, and was 1.60" in warning
    assert "spec.frozen=false" in warning
    lengths.begin(3)
    observe(lengths, 0.2)
    assert len(warnings()) == 1


def test_like_is_compared_with_like(warnings):
    for lengths, steps in (
        (AcceptLengths(PARTS), [(1.0, 0.0, _ROWS), (0.2, 1.0, _ROWS)]),  # another temperature
        (AcceptLengths(PARTS), [(0.1, 1.0, _ROWS), (0.0, 1.0, 100)]),  # an update too soon
        (AcceptLengths({"target": None}), [(1.0, 1.0, _ROWS), (0.0, 1.0, _ROWS)]),  # no draft model
    ):
        for version, (accepted, temperature, rows) in enumerate(steps):
            lengths.begin(version)
            observe(lengths, accepted, temperature, rows)
    assert not warnings()
