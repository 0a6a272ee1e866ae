"""Expected rollout lengths, from the prompt's other samples and from earlier epochs."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import Any

GROUP_LENGTHS = 32
"""Lengths stored per prompt group: this step's samples and those of an epoch or more before."""

RECENT_LENGTHS = 512
"""Latest lengths stored of all groups together."""

MAX_GROUPS = 65_536
"""Groups stored: with all their lengths, about 35 MB in memory and 15 MB as JSON."""

SHRINKAGE = 2
"""The mean of all groups weighs as much as this many of a group's own lengths."""

_INT32 = 2**31
_GROUP_KEYS = 2**63


class LengthForecast:
    """The expected number of tokens that a rollout has yet to emit.

    The estimate is the mean residual life: the mean excess over ``generated`` of the observed
    lengths that exceed it. A group's own estimate is shrunk towards that of all recent lengths,
    which weigh as much as ``SHRINKAGE`` of its own. It survives weight updates: newer lengths
    replace older ones of their group, and the group observed least recently is dropped first.
    """

    def __init__(self) -> None:
        self._recent = _Lengths(RECENT_LENGTHS)
        self._groups: dict[int, _Lengths] = {}  # least recently observed first

    def __len__(self) -> int:
        """Groups with at least one length."""
        return len(self._groups)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever observed; every forecast is then ``room``."""
        return not self._recent.latest

    def observe(self, group: int, length: int) -> None:
        """Record a rollout that stopped, or reached its limit, after ``length`` >= 1 tokens.

        Not for aborted or failed rollouts: their full length is unknown.
        """
        assert 0 < length < _INT32
        lengths = self._groups.pop(group, None)
        if lengths is None:
            lengths = _Lengths(GROUP_LENGTHS)
            if len(self._groups) == MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
        self._groups[group] = lengths
        lengths.append(length)
        self._recent.append(length)

    def remaining(self, group: int, generated: int, room: int) -> float:
        """Tokens that an unfinished rollout is expected to emit yet, in [1, room].

        A rollout longer than every observed length is expected to be half-way, with ``generated``
        more to come: the estimate where every scale is equally likely (Gott 1993). It ranks
        stragglers above rollouts about to end. If nothing was ever observed, the answer is
        ``room``.

        Args:
            group: Request.group. A group never observed gets the mean of all.
            generated: tokens it has emitted.
            room: tokens it may still emit at most, >= 1.
        """
        if self.is_empty:
            return float(room)
        count, excess = self._recent.beyond(generated)
        lengths = self._groups.get(group)
        own_count, own_excess = lengths.beyond(generated) if lengths is not None else (0, 0)
        if count:
            shrunk = own_excess + SHRINKAGE * excess / count
            expected = shrunk / (own_count + SHRINKAGE)
        else:
            expected = own_excess / own_count if own_count else float(generated)
        return min(max(expected, 1.0), float(room))

    def learned(self) -> dict[str, Any]:
        """The stored lengths as a JSON-able object: little more than ``MAX_GROUPS * GROUP_LENGTHS``
        numbers."""
        return {
            "recent": self._recent.latest.tolist(),
            "groups": {str(group): own.latest.tolist() for group, own in self._groups.items()},
        }

    def restore(self, learned: dict[str, Any]) -> None:
        """Replace everything learned by what `learned` returned; the latest where it is too much.

        Raises ValueError naming what is wrong with ``learned``, and then changes nothing.
        """
        if not isinstance(learned, dict) or learned.keys() != {"recent", "groups"}:
            raise ValueError("learned lengths must be an object with 'recent' and 'groups'")
        recent = _read(learned["recent"], "recent", RECENT_LENGTHS)
        by_group = learned["groups"]
        if not isinstance(by_group, dict):
            raise ValueError("learned lengths: 'groups' must be an object of lists")
        groups: dict[int, _Lengths] = {}
        for name in list(by_group)[-MAX_GROUPS:]:
            try:
                group = int(name)
            except (TypeError, ValueError):
                group = -1
            if not 0 <= group < _GROUP_KEYS:
                raise ValueError(f"learned lengths: group {name!r:.80} must be in [0, 2**63)")
            groups[group] = _read(by_group[name], f"groups[{name}]", GROUP_LENGTHS)
        if groups and not recent.latest:
            raise ValueError("learned lengths: 'recent' is empty and 'groups' is not")
        self._recent, self._groups = recent, groups


class _Lengths:
    """The latest ``max_length`` lengths, with a sorted copy and sums computed on demand."""

    __slots__ = ("_max_length", "_sorted", "_sums", "latest")

    def __init__(self, max_length: int) -> None:
        self.latest = array("i")  # in the order of arrival
        self._max_length = max_length
        self._sorted: list[int] | None = None  # None: outdated by an append
        self._sums: list[int] = []  # [k]: sum of the k longest

    def append(self, length: int) -> None:
        if len(self.latest) == self._max_length:
            del self.latest[0]
        self.latest.append(length)
        self._sorted, self._sums = None, []

    def beyond(self, generated: int) -> tuple[int, int]:
        """The number of lengths that exceed ``generated``, and the sum of their excesses."""
        ascending = self._sorted
        if ascending is None:
            ascending = self._sorted = sorted(self.latest)
            self._sums = list(accumulate(reversed(ascending), initial=0))
        count = len(ascending) - bisect_right(ascending, generated)
        return count, self._sums[count] - count * generated


def _read(values: object, name: str, max_length: int) -> _Lengths:
    if not isinstance(values, list):
        raise ValueError(f"learned lengths: {name} must be a list, not {values!r:.80}")
    lengths = _Lengths(max_length)
    for value in values[-max_length:]:
        if type(value) is not int or not 0 < value < _INT32:
            raise ValueError(f"learned lengths: {name} holds {value!r:.80}: must be in [1, 2**31)")
        lengths.append(value)
    return lengths
