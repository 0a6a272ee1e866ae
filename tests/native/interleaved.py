"""A state machine that drives the corpus beside the brute-force reference, in any order of calls.

While nothing was dropped every tree must be the reference's, to the last bit. After that, it must
be one that the tokens seen allow, and that a fresh query gives too.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from ngram_native import Corpus, Source
from tests.native.drafts import (
    assert_well_formed,
    extend,
    i32,
    i64,
    leaves,
    path,
    query,
    trees,
)
from tests.native.reference import JUDGED_NODES, ReferenceCorpus

TOKENS = [0, 1, 2, 2**31 - 1]
GROUPS = [0, 1, 2**64 - 1]
SMALL, LARGE = 256 << 10, 32 << 20


def random_text(seed, size, alphabet):
    tokens = np.random.default_rng(seed).integers(0, alphabet, size)
    return [TOKENS[token] for token in tokens]


def texts(max_size):
    """Few seeds, so that texts come again, and sizes that often are the largest."""
    sizes = st.sampled_from([0, 1, 2, 5, max_size // 2, max_size])
    return st.builds(random_text, st.integers(0, 5), sizes, st.sampled_from([2, 4]))


budgets = st.sampled_from([0, 1, 4, JUDGED_NODES, 20, 63])
floors = st.sampled_from([0.0, 0.05, 0.3])
shares = st.sampled_from([None, 0.0, 0.4, 1.0])  # of what was proposed, verified; None: not told


class Interleaved(RuleBasedStateMachine):
    @initialize(
        max_bytes=st.sampled_from([SMALL, LARGE]),
        limits=st.sampled_from([(1, 1), (3, 7), (1, 1024), (8, 1024), (32, 1024)]),
        prompts=st.lists(texts(80), min_size=1, max_size=3),
        full=st.booleans(),
        external=st.booleans(),
        warm=st.sampled_from([0, 8]),
    )
    def begin(self, max_bytes, limits, prompts, full, external, warm):
        candidates, steps = limits
        self.max_bytes = max_bytes
        # Chains are shared by contexts of one hash, and those tokens that were forgotten stay
        # in them: what takes up steps is the corpus's own affair then.
        self.ample_steps = steps == 1024
        self.corpus = Corpus(max_bytes=max_bytes, max_candidates=candidates, max_steps=steps)
        self.reference = ReferenceCorpus(candidates, steps)
        self.exact = True
        self.saved = None
        self.folder = tempfile.TemporaryDirectory()
        self.next_id = 0
        self.fills = 0
        for group, prompt in zip(GROUPS, prompts, strict=False):
            self.begin_sequence(group, prompt)
        if full and max_bytes == SMALL:
            self.fill(0, GROUPS[1])
        if warm:  # so that the estimates have learned something
            self.generate(accepted=4, own=random_text(0, 40, 2), budget=JUDGED_NODES, steps=warm)
        if external and self.ample_steps:
            self.add_or_remove_external("b", [random_text(seed, 60, 4) for seed in range(4)])

    @property
    def sequences(self):
        return self.reference.sequences

    # -- what is said

    @precondition(lambda self: len(self.sequences) < 5)
    @rule(group=st.sampled_from(GROUPS), prompt=texts(80), extra=texts(4), data=st.data())
    def open(self, group, prompt, extra, data):
        again = [s.text for s in self.sequences.values() if s.document.group == group]
        if again and data.draw(st.booleans(), "resumed"):  # at its end, or cut before it
            prompt = data.draw(st.sampled_from(again))
            prompt = prompt[: data.draw(st.integers(0, len(prompt)))]
        self.begin_sequence(group, prompt + extra)

    def begin_sequence(self, group, text):
        self.corpus.open(self.next_id, group, i32(text))
        self.reference.open(self.next_id, group, text)
        self.next_id += 1

    @rule(tokens=texts(100), group=st.sampled_from([None, *GROUPS]))
    def insert(self, tokens, group):
        self.corpus.insert(i32(tokens), group=group)
        self.reference.insert(tokens, group)

    @precondition(lambda self: self.max_bytes == SMALL and self.fills < 2)
    @rule(seed=st.integers(0, 3), group=st.sampled_from([None, *GROUPS]))
    def fill(self, seed, group):
        """More than a small corpus has room for."""
        tokens = random_text(seed, 8000, 4)
        self.corpus.insert(i32(tokens), group=group)
        self.reference.insert(tokens, group)
        self.fills += 1

    @precondition(lambda self: self.sequences)
    @rule(
        accepted=st.integers(0, 6),
        own=texts(40),
        budget=budgets,
        steps=st.integers(1, 4),
        share=shares,
    )
    def generate(self, accepted, own, budget, steps, share=None):
        """Act as an engine: propose for all, then commit part of a tree and the sampled tokens."""
        for step in range(steps):
            ids = list(self.sequences)
            drafts = self.compare_proposals(ids, [budget] * len(ids), 0.0)
            added = {}
            for b, (sequence_id, tree) in enumerate(zip(ids, drafts, strict=True)):
                deepest = path(tree, max(leaves(tree))) if tree else []
                sampled = own[step : step + 1 + (step + b) % 3]
                added[sequence_id] = deepest[: max(accepted - step % 3, 0)] + sampled
            self.extend_all(added, share)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), share=shares)
    def extend(self, data, share):
        ids = data.draw(st.permutations(list(self.sequences)), "sequences")
        self.extend_all({sequence_id: data.draw(texts(70), "tokens") for sequence_id in ids}, share)

    def extend_all(self, added, share):
        drafted = [self.sequences[sequence_id].drafted for sequence_id in added]
        verified = None if share is None else [int(share * count) for count in drafted]
        extend(self.corpus, added, verified)
        for b, (sequence_id, tokens) in enumerate(added.items()):
            self.reference.extend(sequence_id, tokens, verified and verified[b])

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def close(self, data):
        sequence_id = data.draw(st.sampled_from(list(self.sequences)))
        self.corpus.close(sequence_id)
        self.reference.close(sequence_id)

    @rule(version=st.integers(-1, 2))
    def set_weight_version(self, version):
        self.corpus.set_weight_version(version)
        self.reference.set_weight_version(version)

    @precondition(lambda self: self.ample_steps)
    @rule(name=st.sampled_from("ab"), documents=st.lists(texts(60), max_size=3))
    def add_or_remove_external(self, name, documents):
        if name in self.reference.externals:
            self.corpus.remove_external(name)
            self.reference.remove_external(name)
        else:
            self.corpus.add_external(name, [i32(tokens) for tokens in documents])
            self.reference.add_external(name, documents)

    @precondition(lambda self: self.ample_steps or not self.sequences)
    @rule()
    def reset(self):
        self.corpus.reset()
        self.reference.reset()
        self.exact = True

    @rule()
    def save(self):
        self.corpus.save(Path(self.folder.name) / "corpus")
        self.saved = self.reference.save(), self.exact

    @precondition(lambda self: self.saved and (self.ample_steps or not self.sequences))
    @rule()
    def load(self):
        self.corpus.load(Path(self.folder.name) / "corpus")
        saved, self.exact = self.saved
        self.reference.load(saved)

    # -- what may come next

    @rule(group=st.sampled_from([*GROUPS, 7]), text=texts(50), budget=budgets, floor=floors)
    def query(self, group, text, budget, floor):
        self.notice_dropped()
        tree = query(self.corpus, group, text, budget, floor)
        if self.exact:
            expected = self.reference.query(group, text, budget)
            self.assert_same(tree, self.reference.cut(expected, budget, floor))
        self.assert_seen(group, text, tree, budget, floor)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), floor=floors)
    def propose(self, data, floor):
        ids = data.draw(st.permutations(list(self.sequences)), "sequences")
        ids = ids[: data.draw(st.integers(1, len(ids)), "of them")]
        self.compare_proposals(ids, [data.draw(budgets, "budget") for _ in ids], floor)

    def compare_proposals(self, ids, sizes, floor):
        self.notice_dropped()
        together = trees(self.corpus.propose(i64(ids), i32(sizes), floor))
        assert len(together) == len(ids)
        for sequence_id, budget, tree in zip(ids, sizes, together, strict=True):
            sequence = self.sequences[sequence_id]
            group = sequence.document.group
            (alone,) = trees(self.corpus.propose(i64([sequence_id]), i32([budget]), floor))
            assert alone == tree
            assert query(self.corpus, group, sequence.text, budget, floor) == tree
            if self.exact:
                self.assert_same(tree, self.reference.propose(sequence_id, budget, floor))
            sequence.drafted = len(tree)
            self.assert_seen(group, sequence.text, tree, budget, floor)
        return together

    def notice_dropped(self):
        self.exact = self.exact and self.corpus.counters()["dropped_tokens"] == 0

    def assert_same(self, tree, expected):
        assert [node[:3] for node in tree] == [(n.token, n.parent, n.depth) for n in expected]
        assert [node.probability for node in tree] == [
            float(np.float32(node.probability)) for node in expected
        ]
        assert [Source(node.source).name for node in tree] == [n.source.upper() for n in expected]

    def assert_seen(self, group, text, tree, budget, floor):
        assert_well_formed(tree, budget, floor)
        paths = [path(tree, leaf) for leaf in leaves(tree)]
        assert self.reference.unseen(group, text, paths) == []

    # -- always

    @invariant()
    def books_balance(self):
        self.corpus.check_integrity()
        counters = self.corpus.counters()
        self.notice_dropped()
        if self.exact:
            assert self.corpus.num_tokens == self.reference.num_tokens
        assert counters["open_sequences"] == len(self.sequences)
        assert self.corpus.num_bytes - counters["external_bytes"] <= self.max_bytes
        assert self.corpus.external_names() == sorted(self.reference.externals)

    def teardown(self):
        self.folder.cleanup()


def repeatable(max_examples: int, steps: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # shrinking such a failure takes longer than the test may
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
