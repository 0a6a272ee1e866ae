"""The corpus against a slow model of itself: same documents, same trees, to the last bit.

The model keeps every token as an object, finds occurrences by looking at all of them, and restarts
each query from the sequence's whole text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from ngram_native import Corpus

PAGE = 32
MAX_MATCH = 32
JUDGED_NODES = 8
SCOPE_WEIGHT = {"group": 1.0, "live": 0.2, "external": 0.2}
TRUST = {"group": 0.9, "live": 0.6, "external": 0.6}


def match_weights():
    weights, weight = [], 1.0
    for match in range(MAX_MATCH + 1):
        weights.append(weight)
        weight *= 2.0 if match < 12 else 1.05
    return weights


MATCH_WEIGHT = match_weights()


@dataclass(eq=False)
class Said:
    """One token of the log."""

    token: int
    before: Said | None
    group: int | None
    policy: int  # of its page
    offset: int  # in its page
    after: Said | None = None


@dataclass(eq=False)
class Writer:
    group: int | None
    last: Said | None = None
    own: bool = False  # the last token is this document's own, not one it branched from


@dataclass
class Cell:
    expected: float = 0.0
    right: float = 0.0


@dataclass(eq=False)
class Open:
    writer: Writer
    text: list[int] = field(default_factory=list)
    draft: list[dict] = field(default_factory=list)


def bucket(value, ends):
    return sum(value > end for end in ends)


class Model:
    def __init__(self, max_candidates, max_steps):
        self.most, self.steps = max_candidates, max_steps
        self.live, self.externals = [], {}
        self.segments = []  # first tokens of segments
        self.open_sequences = {}
        self.policy, self.version = 0, 0
        self.cells = {}

    # -- the log

    def write(self, log, writer, token, policy):
        last = writer.last
        goes_on = writer.own and last.offset + 1 < PAGE
        said = Said(
            token,
            last,
            writer.group,
            last.policy if goes_on else policy,
            last.offset + 1 if goes_on else 0,
        )
        if writer.own:
            last.after = said
        elif log is self.live and writer.group is not None:
            self.segments.append(said)
        writer.last, writer.own = said, True
        log.append(said)

    def insert(self, tokens, group=None):
        writer = Writer(group)
        for token in tokens:
            self.write(self.live, writer, token, self.policy)

    def add_external(self, name, documents):
        log = self.externals.setdefault(name, [])
        for document in documents:
            writer = Writer(None)
            for token in document:
                self.write(log, writer, token, 0)

    def held(self, group, tokens, last=None):
        """The longest run of tokens from a document's start, and its last token."""
        best = (0, last)
        for start in self.segments:
            if start.group != group or start.before is not last:
                continue
            said, length = start, 0
            while said is not None and length < len(tokens) and said.token == tokens[length]:
                length += 1
                deeper, end = self.held(group, tokens[length:], said)
                if length + deeper > best[0]:
                    best = (length + deeper, end)
                said = said.after
        return best

    def open(self, sequence_id, group, tokens):
        length, last = self.held(group, tokens)
        sequence = Open(Writer(group, last), list(tokens))
        for token in tokens[length:]:
            self.write(self.live, sequence.writer, token, self.policy)
        self.open_sequences[sequence_id] = sequence

    def extend(self, sequence_id, tokens):
        sequence = self.open_sequences[sequence_id]
        if not tokens:
            return
        on_path = 0
        for token in tokens:
            matched = None
            for j, node in enumerate(sequence.draft):
                if node["parent"] != on_path:
                    continue
                cell = self.cells.setdefault(node["cell"], Cell())
                cell.expected += node["prior"]
                cell.right += node["token"] == token
                if cell.expected > 50:
                    cell.expected *= 0.5
                    cell.right *= 0.5
                if node["token"] == token:
                    matched = j + 1
            if matched is None:
                break
            on_path = matched
        sequence.draft = []
        for token in tokens:
            self.write(self.live, sequence.writer, token, self.policy)
        sequence.text += tokens

    def set_weight_version(self, version):
        if version != self.version:
            self.version = version
            self.policy += 1
            for cell in self.cells.values():
                cell.expected *= 0.8
                cell.right *= 0.8

    # -- queries

    def search(self, log, text, orders, source, group):
        found, shorter_than = [], MAX_MATCH + 1
        for order in orders:
            steps = 0
            for said in reversed(log):
                if source == "group" and said.group != group:
                    continue
                match, before = 0, said.before
                while (
                    before is not None
                    and match < min(MAX_MATCH, len(text))
                    and before.token == text[-1 - match]
                ):
                    match, before = match + 1, before.before
                if match < order:
                    continue
                steps += 1
                if steps > self.steps:
                    break
                if match >= shorter_than or (source == "live" and said.group == group):
                    continue
                age = self.policy - said.policy if source != "external" else 0
                found.append((said, match, source, SCOPE_WEIGHT[source] / (1.0 + 0.15 * age)))
                if len(found) == self.most:
                    return found
            shorter_than = order
        return found

    def children(self, followers, depth, probability):
        children = {}  # in the order of their first followers
        total = 0.0
        for said, match, source, weight in followers:
            match = min(match + depth, MAX_MATCH)
            weight *= MATCH_WEIGHT[match]
            total += weight
            child = children.setdefault(
                said.token, {"count": 0, "match": 0, "weight": 0.0, "source": None}
            )
            child["count"] += 1
            child["weight"] = child["weight"] + weight if child["count"] > 1 else weight
            if match > child["match"]:
                child["match"], child["source"] = match, source
        for token, child in children.items():
            share = child["weight"] / total
            match, count, source = child["match"], child["count"], child["source"]
            prior = TRUST[source] * share * (match / (match + 0.7)) * (count / (count + 0.1))
            cell = (
                source,
                bucket(match, (1, 2, 3, 5, 8, 12, 20)),
                sum(share >= end for end in (0.1, 0.25, 0.5, 0.75, 0.95)),
                bucket(count, (1, 2, 5)),
                depth > 0,
            )
            seen = self.cells.get(cell, Cell())
            estimate = min(prior * ((seen.right + 2.0) / (seen.expected + 2.0)), 0.98)
            yield {
                "token": token,
                "probability": probability * estimate,
                "prior": prior,
                "cell": cell,
            }

    def query(self, group, text, budget):
        followers = self.search(self.live, text, (4, 1), "group", group)
        followers += self.search(self.live, text, (5, 2), "live", group)
        for name in sorted(self.externals):
            followers += self.search(self.externals[name], text, (5, 2), "external", group)
        nodes, waiting = [], []

        def expand(parent, depth, probability, followers):
            for child in self.children(followers, depth, probability):
                going_on = [
                    (said.after, *rest)
                    for said, *rest in followers
                    if said.token == child["token"] and said.after is not None
                ]
                waiting.append(
                    {**child, "parent": parent, "depth": depth + 1, "followers": going_on}
                )

        expand(0, 0, 1.0, followers)
        while waiting and len(nodes) < max(budget, JUDGED_NODES):
            best = max(waiting, key=lambda child: child["probability"])  # the first of equals
            waiting.remove(best)
            nodes.append(best)
            expand(len(nodes), best["depth"], best["probability"], best.pop("followers"))
        return nodes

    def propose(self, sequence_id, budget, min_probability):
        sequence = self.open_sequences[sequence_id]
        sequence.draft = []
        if budget > 0:
            sequence.draft = self.query(sequence.writer.group, sequence.text, budget)
        return [node for node in sequence.draft if node["probability"] >= min_probability][:budget]


def i32(tokens):
    return np.array(tokens, np.int32)


def flat(lists):
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return i32([token for tokens in lists for token in tokens]), offsets


def assert_same_trees(proposal, trees):
    assert np.diff(proposal.offsets_B1).tolist() == [len(tree) for tree in trees]
    nodes = [node for tree in trees for node in tree]
    assert proposal.tokens_N.tolist() == [node["token"] for node in nodes]
    assert proposal.parents_N.tolist() == [node["parent"] for node in nodes]
    assert proposal.depths_N.tolist() == [node["depth"] for node in nodes]
    expected = np.array([node["probability"] for node in nodes], np.float32)
    np.testing.assert_array_equal(proposal.probabilities_N, expected)


@pytest.mark.parametrize("seed", range(12))
def test_every_tree_is_the_models(seed):
    rng = random.Random(seed)
    most, steps = [(1, 1), (3, 7), (1, 100), (8, 100), (32, 128)][seed % 5]
    alphabet = rng.choice([2, 3, 9])
    corpus, model = Corpus(max_candidates=most, max_steps=steps), Model(most, steps)
    prompts = [[rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 5, 40]))] for _ in "abc"]
    ids = []

    def text(most):
        return [rng.randrange(alphabet) for _ in range(rng.randrange(most + 1))]

    def open_sequence(sequence_id):
        group = rng.randrange(3)
        tokens = list(prompts[group])
        resumed = [s for s in model.open_sequences.values() if s.writer.group == group]
        if resumed and rng.random() < 0.4:  # cut and resubmitted, at the end or before it
            tokens = rng.choice(resumed).text
            tokens = tokens[: rng.randrange(len(tokens) + 1)]
        if rng.random() < 0.3:
            tokens = tokens + text(4)
        corpus.open(sequence_id, group, i32(tokens))
        model.open(sequence_id, group, tokens)
        ids.append(sequence_id)

    for turn in range(60):
        if turn % 3 == 0 and len(ids) < 8:
            open_sequence(turn)
        if rng.random() < 0.2:
            tokens, group = text(50), rng.choice([None, 0, 1])
            corpus.insert(i32(tokens), group=group)
            model.insert(tokens, group)
        if rng.random() < 0.2:
            version = rng.randrange(3)
            corpus.set_weight_version(version)
            model.set_weight_version(version)
        # An external corpus has a small table: contexts that share a slot take up steps.
        if turn in (20, 30) and steps >= 100:
            documents = [text(40) for _ in range(3)]
            corpus.add_external(f"corpus {turn}", [i32(d) for d in documents])
            model.add_external(f"corpus {turn}", documents)
        if len(ids) > 3 and rng.random() < 0.2:
            gone = ids.pop(rng.randrange(len(ids)))
            corpus.close(gone)
            del model.open_sequences[gone]
        assert corpus.num_tokens == len(model.live) + sum(map(len, model.externals.values()))
        budgets = [rng.choice([0, 1, 4, 8, 20, 63]) for _ in ids]
        floor = rng.choice([0.0, 0.05, 0.3])
        proposal = corpus.propose(np.array(ids, np.int64), i32(budgets), floor)
        trees = [model.propose(s, n, floor) for s, n in zip(ids, budgets, strict=True)]
        assert_same_trees(proposal, trees)
        added = []
        for tree in trees:
            path, parent = [], 0
            while rng.random() < 0.7:  # down the tree, so that drafts come true
                below = [j for j, node in enumerate(tree) if node["parent"] == parent]
                if not below:
                    break
                path.append(tree[below[0]]["token"])
                parent = below[0] + 1
            added.append((path + text(2))[: rng.choice([1, 8])])
        corpus.extend(np.array(ids, np.int64), *flat(added))
        for sequence_id, tokens in zip(ids, added, strict=True):
            model.extend(sequence_id, tokens)
    assert corpus.num_tokens == len(model.live) + sum(map(len, model.externals.values()))
    corpus.check_integrity()
