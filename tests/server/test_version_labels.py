"""Labels of weight versions: kept until another name comes, and told in place of numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollout.server.version_labels import VersionLabels


def spans(labels: VersionLabels, *spans: tuple[int, int, int]) -> list[tuple[str, int, int]]:
    rollout: Any = SimpleNamespace(weight_version_spans=list(spans))
    return [tuple(each.values()) for each in labels.spans(rollout)]


def test_a_label_stays_until_another_name_comes() -> None:
    labels = VersionLabels()
    labels.note(0, 1, "v1")
    labels.note(1, 2, None)
    labels.note(2, 2, 7)  # of a draft alone
    labels.note(2, 3, "v3")
    labels.note(3, 9, 9)
    assert [labels.of(version) for version in (0, 1, 2, 3, 9)] == ["0", "v1", "v1", "v3", "9"]
    assert spans(labels, (1, 0, 4), (2, 4, 6), (3, 6, 7)) == [("v1", 0, 6), ("v3", 6, 7)]
    labels.note(9, 2, None)
    assert labels.of(2) == "2"


def test_old_labels_are_forgotten() -> None:
    labels = VersionLabels()
    for version in range(5000):
        labels.note(version, version + 1, f"v{version + 1}")
    assert (labels.of(1), labels.of(5000)) == ("1", "v5000")
