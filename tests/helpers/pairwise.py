"""Rows of a test matrix in which any two values that can meet do: an all-pairs covering design."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from random import Random

Row = dict[str, str]  # factor -> value
Pair = tuple[tuple[str, str], tuple[str, str]]

_TRIES = 20  # rows thought of for each row that is taken


class PairwiseDesign:
    """Greedy, as AETG (Cohen et al. 1997): each row meets as many pairs anew as a few tries find.

    The same arguments give the same rows, on every machine.
    """

    def __init__(
        self, factors: Mapping[str, Sequence[str]], is_possible: Callable[[Row], bool]
    ) -> None:
        """``is_possible``: whether a row, or a part of one, contradicts no rule."""
        self._factors = factors
        self._is_possible = is_possible
        self._random = Random(0)
        self._missing: dict[Pair, None] = dict.fromkeys(self.pairs())  # an ordered set

    def pairs(self) -> list[Pair]:
        """Every two values that may meet."""
        return [
            ((one, a), (other, b))
            for one, other in combinations(self._factors, 2)
            for a in self._factors[one]
            for b in self._factors[other]
            if self._is_possible({one: a, other: b})
        ]

    def pairs_of(self, row: Row) -> list[Pair]:
        """The pairs that meet in a row, or in a part of one."""
        return list(combinations(((name, row[name]) for name in self._factors if name in row), 2))

    def rows(self, wanted: Iterable[Row] = ()) -> list[Row]:
        """Rows that begin with ``wanted``, each of those completed. ValueError: one cannot be."""
        found = [self._take(part) for part in wanted]
        while self._missing:
            found.append(self._take(dict(next(iter(self._missing)))))
        return found

    def _take(self, part: Row) -> Row:
        tries = [row for _ in range(_TRIES) if (row := self._completed(part)) is not None]
        if not tries:
            raise ValueError(f"no row has {part}")
        row = max(tries, key=self._gain)
        for pair in self.pairs_of(row):
            self._missing.pop(pair, None)
        return row

    def _completed(self, part: Row) -> Row | None:
        row = dict(part)
        names = [name for name in self._factors if name not in row]
        self._random.shuffle(names)
        for name in names:
            values = [v for v in self._factors[name] if self._is_possible(row | {name: v})]
            if not values:
                return None
            self._random.shuffle(values)
            row[name] = max(values, key=lambda value: self._gain(row | {name: value}))
        return row

    def _gain(self, row: Row) -> int:
        return sum(pair in self._missing for pair in self.pairs_of(row))
