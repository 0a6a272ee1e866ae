"""How long a rollout will become, from the lengths of its siblings and of earlier epochs."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import Any

GROUP_LENGTHS = 32
"""Lengths kept per prompt group: this step's siblings and an epoch or more before them."""

RECENT_LENGTHS = 512
"""Lengths kept of all groups together."""

MAX_GROUPS = 65_536
"""Groups kept: with all their lengths, about 35 MB here and 15 MB as JSON."""

SHRINKAGE = 2
"""How many of a group's own lengths the mean of all groups counts for."""

_INT32 = 2**31
_GROUP_KEYS = 2**63


class LengthForecast:
    """The expected rest of a rollout, given how far it has come.

    An estimate is the mean residual life: by how much the lengths seen exceed ``generated``, on
    average over those that do. A group's own is shrunk towards that of all recent lengths, which
    count for ``SHRINKAGE`` of its own. It outlives weight updates: newer lengths push out older
    ones, those of a group the group's, and of groups the one observed least recently goes first.
    """

    def __init__(self) -> None:
        self._recent = _Lengths(RECENT_LENGTHS)
        self._groups: dict[int, _Lengths] = {}  # least recently observed first

    def __len__(self) -> int:
        """Groups of which something is known."""
        return len(self._groups)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever observed: every forecast is then the room there is."""
        return not self._recent.latest

    def observe(self, group: int, length: int) -> None:
        """A rollout ended by itself or at its limit after ``length`` >= 1 tokens.

        Not for aborted or failed ones: how long those would have become is not known.
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
        """Tokens a rollout is expected to emit yet: in [1, room].

        Args:
            group: Request.group. One never observed counts as the mean of all.
            generated: tokens it has emitted; it goes on.
            room: the most it may still emit, >= 1.

        A rollout that has outlived everything seen is taken to be half-way, at ``generated`` more:
        that is all that a length without a scale of its own says (Gott 1993), and it ranks the
        stragglers, which end a step, above those about to end. Where nothing was ever observed it
        is ``room``.
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
        """All it knows, for JSON: at most ``MAX_GROUPS * GROUP_LENGTHS`` numbers and some."""
        return {
            "recent": self._recent.latest.tolist(),
            "groups": {str(group): own.latest.tolist() for group, own in self._groups.items()},
        }

    def restore(self, learned: dict[str, Any]) -> None:
        """Know what `learned` gave, and nothing else. Of more than is kept, the latest.

        Raises ValueError naming what is wrong with ``learned``, and is as it was.
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
    """The latest ``most`` lengths; sorted, with sums from each on, once somebody asks."""

    __slots__ = ("_max_length", "_sorted", "_sums", "latest")

    def __init__(self, most: int) -> None:
        self.latest = array("i")  # in the order they came
        self._max_length = most
        self._sorted: list[int] | None = None  # None: not since the last append
        self._sums: list[int] = []  # [k]: of the k longest

    def append(self, length: int) -> None:
        if len(self.latest) == self._max_length:
            del self.latest[0]
        self.latest.append(length)
        self._sorted, self._sums = None, []

    def beyond(self, generated: int) -> tuple[int, int]:
        """How many lengths exceed ``generated``, and by how much all together."""
        ascending = self._sorted
        if ascending is None:
            ascending = self._sorted = sorted(self.latest)
            self._sums = list(accumulate(reversed(ascending), initial=0))
        count = len(ascending) - bisect_right(ascending, generated)
        return count, self._sums[count] - count * generated


def _read(values: object, name: str, most: int) -> _Lengths:
    if not isinstance(values, list):
        raise ValueError(f"learned lengths: {name} must be a list, not {values!r:.80}")
    lengths = _Lengths(most)
    for value in values[-most:]:
        if type(value) is not int or not 0 < value < _INT32:
            raise ValueError(f"learned lengths: {name} holds {value!r:.80}: must be in [1, 2**31)")
        lengths.append(value)
    return lengths
