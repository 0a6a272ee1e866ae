"""The reference's estimate of what comes next, in one place so that it can be exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

MAX_MATCH = 32  # tokens of context compared
SCOPE_WEIGHT = {"group": 1.0, "live": 0.2, "external": 0.2, "gap": 1.0}
TRUST = {"group": 0.9, "live": 0.6, "external": 0.6, "gap": 0.5}
GAP_MATCH = 2  # what an occurrence across a gap weighs as
SEGMENTS = 20


class Basis(NamedTuple):
    """The parts of one step's estimate, by which it is learned from."""

    prior: float
    corrected: float
    evidence: tuple
    agreement: tuple


class Guess(Protocol):
    """The fields of a tree's node that judging reads."""

    token: int
    parent: int  # tree numbering
    depth: int
    basis: Basis
    product: float


def bucket(value: float, begins: Sequence[float]) -> int:
    return sum(value >= begin for begin in begins)


def single(value: float) -> float:
    return float(np.float32(value))


class Estimator:
    """Every figure of the estimate: what an occurrence weighs, how probable a child is, and what
    is learned from the tokens that came."""

    def __init__(self) -> None:
        self.cells: dict[tuple, tuple[float, float]] = {}  # expected and right so far
        self.knots: dict[tuple[int, int], tuple[float, float]] = {}  # count and sum of heights
        self.match_weight = [1.0]
        for match in range(MAX_MATCH):
            self.match_weight.append(self.match_weight[-1] * (2.0 if match < 12 else 1.05))

    def weight(self, source: str, match: int, age: int) -> float:
        length = GAP_MATCH if source == "gap" else match
        return SCOPE_WEIGHT[source] * self.match_weight[length] / (1.0 + 0.15 * age)

    def step(
        self, source: str, match: int, count: int, share: float, sources: set[str], depth: int
    ) -> tuple[float, Basis]:
        """Probability that the token comes next, given that its parent did."""
        deep = bucket(depth, (2, 3, 5))
        prior = TRUST[source] * share * (match / (match + 0.7)) * (count / (count + 0.1))
        evidence = (
            source,
            bucket(match, (2, 3, 4, 6, 9, 13, 21)),
            bucket(int(share * 20.0), (2, 5, 10, 15, 19)),
            bucket(count, (2, 3, 6)),
            deep,
        )
        corrected = min(prior * self._ratio(evidence), 0.98)
        level = bucket(int(corrected * 100.0), (3, 6, 10, 16, 25, 35, 50, 65, 80, 90, 95))
        agreement = (frozenset(sources), level, deep)
        probability = min(corrected * self._ratio(agreement), 0.98)
        return probability, Basis(single(prior), single(corrected), evidence, agreement)

    def path(self, product: float, depth: int) -> float:
        """Probability of the last node of a path whose steps have that product."""
        deep, place = bucket(depth, (2, 3, 5)), product * SEGMENTS
        k = int(place)
        beyond = place - k
        height = (1.0 - beyond) * self._height(deep, k) + beyond * self._height(deep, k + 1)
        return min(height, 0.995)

    def judge(self, draft: Sequence[Guess], verified: int, tokens: Sequence[int]) -> None:
        """Learn from the tokens that came. The first `verified` nodes were verified."""
        came: list[bool | None] = [True]  # by tree number; None: not known
        for node in draft:
            above = came[node.parent]
            if above is None or (above and node.depth > len(tokens)):
                came.append(None)
                continue
            right = above and tokens[node.depth - 1] == node.token
            came.append(right)
            if above:
                self._observe_step(node.basis, right)
            if node.parent <= verified:
                self._observe_path(node.product, node.depth, right)

    def decay(self) -> None:
        self.cells = {cell: (e * 0.8, r * 0.8) for cell, (e, r) in self.cells.items()}
        self.knots = {knot: (n * 0.8, h * 0.8) for knot, (n, h) in self.knots.items()}

    def _ratio(self, cell: tuple) -> float:
        expected, right = self.cells.get(cell, (0.0, 0.0))
        return (right + 2.0) / (expected + 2.0)

    def _height(self, deep: int, k: int) -> float:
        if k == 0:
            return 0.0
        count, heights = self.knots.get((deep, k), (0.0, 0.0))
        straight = k / SEGMENTS
        return max((heights + 20.0 * straight) / (count + 20.0), 0.02 * straight)

    def _observe_step(self, basis: Basis, right: bool) -> None:
        for cell, probability in (
            (basis.evidence, basis.prior),
            (basis.agreement, basis.corrected),
        ):
            expected, hits = self.cells.get(cell, (0.0, 0.0))
            expected, hits = expected + probability, hits + right
            self.cells[cell] = (expected * 0.5, hits * 0.5) if expected > 200 else (expected, hits)

    def _observe_path(self, product: float, depth: int, right: bool) -> None:
        deep, place = bucket(depth, (2, 3, 5)), product * SEGMENTS
        k = int(place)
        beyond = place - k
        for knot, weight in ((k, 1.0 - beyond), (k + 1, beyond)):
            count, heights = self.knots.get((deep, knot), (0.0, 0.0))
            count += weight
            heights += weight * (knot / SEGMENTS + ((1.0 if right else 0.0) - product))
            if count > 1000:
                count, heights = count * 0.5, heights * 0.5
            self.knots[deep, knot] = count, heights
