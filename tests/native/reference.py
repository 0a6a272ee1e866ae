"""The corpus by brute force: plain lists of every token, searched from end to end.

It decides what the C++ corpus must answer. It drops nothing: once the corpus has dropped tokens,
`ReferenceCorpus.followed` tells whether a draft is at all a continuation that was seen.
"""

from __future__ import annotations

import copy
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MAX_MATCH = 32  # tokens of context compared
SCOPE_WEIGHT = {"group": 1.0, "live": 0.2, "external": 0.2, "gap": 1.0}
TRUST = {"group": 0.9, "live": 0.6, "external": 0.6, "gap": 0.5}
GAP_MATCH = 2  # what an occurrence across a gap weighs as
SEGMENTS = 20
PAGE_TOKENS = 32  # a page has the policy under which it was begun
JUDGED_NODES = 8  # a tree is grown to at least this size and judged in full, whatever the budget
ORDERS = {"group": (4, 1), "live": (5, 2), "gap": (4,)}  # contexts searched, longest first
PLENTY = 8  # long contexts of the group that leave other rollouts nothing to say
MIN_WIDER = 6  # occurrences of wider scopes looked at in any case
MAX_GAPS = 8
MIN_EXTERNAL_MATCH = 2


class Basis(NamedTuple):
    """The parts of one step's estimate, by which it is learned from."""

    prior: float
    corrected: float
    evidence: tuple
    agreement: tuple


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

    def judge(self, draft: Sequence, verified: int, tokens: Sequence[int]) -> None:
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


@dataclass(eq=False)
class Document:
    """The tokens of one insert, or of one sequence.

    The first `shared` tokens lie in other documents of the group: they are context here, and
    occurrences there. The rest are occurrences of their own.
    """

    group: int | None
    tokens: list[int] = field(default_factory=list)
    shared: int = 0
    policies: list[int] = field(default_factory=list)  # of the tokens beyond the shared ones


class Occurrence(NamedTuple):
    """A token as what came next after the tokens before it."""

    document: Document
    index: int

    @property
    def token(self) -> int:
        return self.document.tokens[self.index]

    @property
    def policy(self) -> int:
        return self.document.policies[self.index - self.document.shared]

    def match_length(self, text: Sequence[int]) -> int:
        """Tokens before it that agree with the end of `text`, at most MAX_MATCH."""
        match = 0
        while (
            match < min(MAX_MATCH, self.index, len(text))
            and self.document.tokens[self.index - 1 - match] == text[-1 - match]
        ):
            match += 1
        return match

    def following(self) -> Occurrence | None:
        following = Occurrence(self.document, self.index + 1)
        return following if following.index < len(self.document.tokens) else None


class Candidate(NamedTuple):
    occurrence: Occurrence  # of the next token on the path
    match: int  # tokens of context it shares with the query
    source: str
    weight: float


@dataclass
class Node:
    """A node of a tree. Node j of a list is tree node j + 1; the root is tree node 0."""

    token: int
    parent: int
    depth: int
    source: str
    probability: float
    product: float
    basis: Basis
    followers: list[Candidate]  # occurrences of its token that agree with its path


def sampled(occurrences: list, room: int) -> list:
    """One of each of `room` equal parts, at a place that is always the same; all where they fit."""
    if len(occurrences) <= room:
        return occurrences
    ends = [k * len(occurrences) // room for k in range(room + 1)]
    jitters = [mix(0xD1B54A32D192ED03, k) >> 32 for k in range(room)]
    return [
        occurrences[begin + ((end - begin) * jitter >> 32)]
        for begin, end, jitter in zip(ends, ends[1:], jitters, strict=False)
    ]


def mix(hashed: int, value: int) -> int:
    hashed = (hashed ^ value) * 0x9E3779B97F4A7C15 % 2**64
    return hashed ^ hashed >> 29


@dataclass(eq=False)
class OpenSequence:
    document: Document
    text: list[int]
    draft: list[Node] = field(default_factory=list)  # as far as it was grown
    drafted: int = 0  # its first nodes: those handed out since tokens last came


class ReferenceCorpus:
    """`Corpus` without bounds, for at most a few thousand tokens."""

    def __init__(self, max_candidates: int, max_steps: int) -> None:
        self.max_candidates, self.max_steps = max_candidates, max_steps
        self.log: list[Occurrence] = []  # in the order of writing
        self.documents: list[Document] = []  # that it lies in
        self.externals: dict[str, list[Document]] = {}
        self.sequences: dict[int, OpenSequence] = {}
        self.policy = self.version = 0
        self.estimator = Estimator()

    @property
    def num_tokens(self) -> int:
        externals = (d for documents in self.externals.values() for d in documents)
        return len(self.log) + sum(len(document.tokens) for document in externals)

    # -- what is said

    def insert(self, tokens: Sequence[int], group: int | None = None) -> None:
        self._write(Document(group), tokens)

    def open(self, sequence_id: int, group: int, tokens: Sequence[int]) -> None:
        held = max((self._common(d, tokens) for d in self.documents if d.group == group), default=0)
        document = Document(group, list(tokens[:held]), shared=held)
        self._write(document, tokens[held:])
        self.sequences[sequence_id] = OpenSequence(document, list(tokens))

    def extend(self, sequence_id: int, tokens: Sequence[int], verified: int | None = None) -> None:
        if not tokens:
            return
        sequence = self.sequences[sequence_id]
        verified = sequence.drafted if verified is None else verified
        self.estimator.judge(sequence.draft, verified, tokens)
        sequence.draft, sequence.drafted = [], 0
        self._write(sequence.document, tokens)
        sequence.text += tokens

    def close(self, sequence_id: int) -> None:
        del self.sequences[sequence_id]

    def set_weight_version(self, version: int) -> None:
        if version != self.version:
            self.version = version
            self.policy += 1
            self.estimator.decay()

    def add_external(self, name: str, documents: Sequence[Sequence[int]]) -> None:
        self.externals[name] = [
            Document(None, list(tokens), policies=[0] * len(tokens)) for tokens in documents
        ]

    def remove_external(self, name: str) -> None:
        del self.externals[name]

    def reset(self) -> None:
        self.log, self.documents = [], []
        self.estimator = Estimator()
        self._detach_sequences()

    def save(self) -> Any:
        kept = ("log", "documents", "externals", "estimator", "policy", "version")
        return copy.deepcopy({name: getattr(self, name) for name in kept})

    def load(self, saved: Any) -> None:
        self.__dict__.update(copy.deepcopy(saved))
        self._detach_sequences()

    def _detach_sequences(self) -> None:
        """Open sequences keep their text and go on as new documents."""
        for sequence in self.sequences.values():
            sequence.document = Document(sequence.document.group)
            sequence.draft = []

    def _write(self, document: Document, tokens: Sequence[int]) -> None:
        if tokens and not document.policies:
            self.documents.append(document)
        for token in tokens:
            begins_page = len(document.policies) % PAGE_TOKENS == 0
            document.policies.append(self.policy if begins_page else document.policies[-1])
            document.tokens.append(token)
            self.log.append(Occurrence(document, len(document.tokens) - 1))

    @staticmethod
    def _common(document: Document, tokens: Sequence[int]) -> int:
        held = 0
        while held < min(len(tokens), len(document.tokens)) and (
            document.tokens[held] == tokens[held]
        ):
            held += 1
        return held

    # -- what may come next

    def search(self, group: int, text: list[int], source: str, most: int, max_steps: int):
        """The most recent occurrences of the longest context, filled up with shorter ones."""
        found: list[Candidate] = []
        shorter_than = MAX_MATCH + 1
        for order in ORDERS[source]:
            steps = 0
            for said in reversed(self.log):
                in_group = said.document.group == group
                if source != "live" and not in_group:
                    continue
                match = said.match_length(text)
                if match < order:
                    continue
                steps += 1
                if steps > max_steps:
                    break
                if match >= shorter_than or (source == "live" and in_group):
                    continue
                weight = self.estimator.weight(source, match, self.policy - said.policy)
                found.append(Candidate(said, match, source, weight))
                if len(found) == most:
                    return found
            shorter_than = order
        return found

    def search_external(self, documents: list[Document], text: list[int], most: int):
        """The longest matches first, those of one length sorted by context read backwards."""
        by_match: dict[int, list[tuple[list[int], Occurrence]]] = {}
        for document in documents:
            for index in range(len(document.tokens)):
                said = Occurrence(document, index)
                match = said.match_length(text)
                if match > 0:
                    context = document.tokens[max(0, index - MAX_MATCH) : index][::-1]
                    by_match.setdefault(match, []).append((context, said))
        found: list[Candidate] = []
        for match in sorted(by_match, reverse=True):
            weight = self.estimator.weight("external", match, 0)
            occurrences = sorted(by_match[match], key=lambda occurrence: occurrence[0])
            for _, said in sampled(occurrences, most - len(found)):
                if match >= MIN_EXTERNAL_MATCH:
                    found.append(Candidate(said, match, "external", weight))
            if len(found) == most:
                break
        return found

    def candidates(self, group: int, text: list[int]) -> list[Candidate]:
        found = self.search(group, text, "group", self.max_candidates, self.max_steps)
        num_long = sum(candidate.match >= ORDERS["group"][0] for candidate in found)
        most = min(self.max_candidates, self.max_candidates - len(found) + MIN_WIDER)
        if num_long < PLENTY:
            steps = -(-self.max_steps * most // self.max_candidates)
            found = found + self.search(group, text, "live", most, steps)
        if num_long == 0 and len(text) > ORDERS["gap"][0]:
            before = text[-MAX_MATCH:-1]  # of a sequence no more tokens are kept than are compared
            across = self.search(group, before, "gap", MAX_GAPS, self.max_steps)
            found = found + [
                candidate._replace(occurrence=following)
                for candidate in across
                if (following := candidate.occurrence.following()) is not None
            ]
        for name in sorted(self.externals):
            found = found + self.search_external(self.externals[name], text, most)
        return found

    def query(self, group: int, text: list[int], budget: int) -> list[Node]:
        """The tree of JUDGED_NODES nodes, or of `budget` when that is more; best first."""
        candidates = self.candidates(group, text)
        nodes: list[Node] = []
        waiting = self._children(0, 0, 1.0, 1.0, candidates)
        while waiting and len(nodes) < max(budget, JUDGED_NODES):
            best = max(waiting, key=lambda node: node.probability)  # the first of equals
            waiting.remove(best)
            nodes.append(best)
            going_on = [
                candidate._replace(occurrence=following)
                for candidate in best.followers
                if (following := candidate.occurrence.following()) is not None
            ]
            waiting += self._children(
                len(nodes), best.depth, best.probability, best.product, going_on
            )
        return nodes

    def propose(self, sequence_id: int, budget: int, min_probability: float) -> list[Node]:
        sequence = self.sequences[sequence_id]
        sequence.draft = []
        if budget > 0:
            sequence.draft = self.query(sequence.document.group, sequence.text, budget)
        handed_out = self.cut(sequence.draft, budget, min_probability)
        sequence.drafted = len(handed_out)
        return handed_out

    @staticmethod
    def cut(nodes: list[Node], budget: int, min_probability: float) -> list[Node]:
        likely = itertools.takewhile(lambda node: node.probability >= min_probability, nodes)
        return list(itertools.islice(likely, budget))

    def _children(
        self,
        parent: int,
        depth: int,
        probability: float,
        product: float,
        candidates: list[Candidate],
    ) -> list[Node]:
        by_token: dict[int, list[Candidate]] = {}  # in the order of first followers
        total = 0.0
        for candidate in candidates:
            total += candidate.weight
            by_token.setdefault(candidate.occurrence.token, []).append(candidate)
        nodes = []
        for token, followers in by_token.items():
            longest = max(followers, key=lambda candidate: candidate.match)  # the first of equals
            weight = 0.0
            for candidate in followers:
                weight += candidate.weight
            step, basis = self.estimator.step(
                longest.source,
                min(longest.match + depth, MAX_MATCH),
                len(followers),
                min(weight * (1.0 / total), 1.0),
                {candidate.source for candidate in followers},
                depth + 1,
            )
            along = single(product * step)
            estimate = min(probability, self.estimator.path(along, depth + 1))
            source = longest.source
            nodes.append(Node(token, parent, depth + 1, source, estimate, along, basis, followers))
        return nodes

    def unseen(self, group: int, text: list[int], paths: list[list[int]]) -> list[list[int]]:
        """The paths that never came, in one document, after so long an end of `text` as is searched
        for. Whatever part of the tokens a corpus still holds, it may draft none of these."""
        unseen = paths
        for source, documents in (
            ("live", self.documents),
            *(("external", documents) for documents in self.externals.values()),
        ):
            for document in documents:
                in_group = source == "live" and document.group == group
                shortest = MIN_EXTERNAL_MATCH if source == "external" else ORDERS[source][-1]
                if in_group:
                    shortest = ORDERS["group"][-1]
                if len(text) < shortest:
                    continue
                context = text[len(text) - shortest :]
                said = array("i", document.tokens).tobytes()
                unseen = [path for path in unseen if not _contains(said, context, path)]
                before = text[-1 - ORDERS["gap"][0] : -1]
                if in_group and len(before) == ORDERS["gap"][0]:
                    unseen = [path for path in unseen if not _contains(said, before, path, gap=1)]
        return unseen


def _contains(said: bytes, context: list[int], path: list[int], gap: int = 0) -> bool:
    """Whether the path came after the context, with `gap` tokens of any kind between them."""
    size = array("i").itemsize
    first, then = array("i", context).tobytes(), array("i", path).tobytes()
    at = said.find(first)
    while at >= 0:
        if at % size == 0 and said.startswith(then, at + len(first) + gap * size):
            return True
        at = said.find(first, at + 1)
    return False
