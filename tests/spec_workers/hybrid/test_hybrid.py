"""The hybrid worker: what it asks the draft, what it proposes, and what it tells the corpus."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.config import engine_config
from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.budget import FixedBudget, LearnedBudget
from spec_workers.corpus.ngram_corpus import NgramCorpus
from spec_workers.corpus.options import CorpusOptions
from spec_workers.hybrid import HybridWorker, hybrid_sources
from spec_workers.target import TargetWorker
from tests.helpers.compared import numbers
from tests.helpers.requests import make_trees
from tests.helpers.tree_checks import check_trees, paths_of

PROMPTS = [[5, 9, 11, 3, 70], [1, 2, 3], [40, 41]]
PARAMS = SamplingParams(max_new_tokens=24, seed=4, n=2, ignore_eos=True)
VOCAB = 97


class OracleDrafter:
    """A stand-in for `NeuralDrafter` that knows the rollouts: it grows chains of ``depth`` recorded
    tokens, each with a wrong sibling."""

    sources = ("oracle",)
    features = AuxHiddenStates()
    lockstep = False
    is_warm = True

    def __init__(self, recorded, *, depth, right) -> None:
        """
        Args:
            recorded: (prompt_index, sample_index) -> all tokens of that rollout, prompt included.
            right: the probability that a recorded token is likelier than its sibling.
        """
        self._recorded = recorded
        self._depth = depth
        self._right = right
        self._rng = np.random.default_rng(0)
        self.max_draft_tokens = 2 * depth
        self.num_asked = self.num_observed = self.num_released = 0

    def propose(self, batch, floors_B, entries, token_ms_B=None):
        shapes, probs = [], []
        for b, entry in enumerate(batch.entries):
            tokens, parents = [], []
            if entry.samples and b in entries:
                tokens, parents = self._tree(entry.request, len(entry.draft_slots))
                self.num_asked += 1
            # Nodes come in pairs, the likelier first; below that one the next pair.
            joint = [0.8 ** (j // 2) * (0.8, 0.1)[j % 2] for j in range(len(tokens))]
            order = sorted(range(len(tokens)), key=lambda j: -joint[j])
            number = {0: 0} | {j + 1: rank for rank, j in enumerate(order, start=1)}
            shapes.append(([tokens[j] for j in order], [number[parents[j]] for j in order]))
            probs += [joint[j] for j in order]
        trees = make_trees(shapes)
        trees.probs_N = np.array(probs, dtype=np.float32)
        return trees

    def _tree(self, request, room):
        truth = self._recorded[request.prompt_index, request.sample_index][len(request.tokens) :]
        tokens, parents, parent = [], [], 0
        for token in truth[: min(self._depth, room // 2)]:
            wrong = (token + 1) % VOCAB
            first, second = (token, wrong) if self._rng.random() < self._right else (wrong, token)
            tokens += [first, second]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return tokens, parents

    def observe(self, step, *, prompts_alone=False) -> None:
        self.num_observed += not prompts_alone

    def release(self, request) -> None:
        self.num_released += 1

    def weights_changed(self) -> None: ...

    def check_integrity(self, running) -> None: ...

    def counters(self):
        return {"draft/asked": self.num_asked}


SOURCES = hybrid_sources(OracleDrafter.sources)


class WatchedWorker(HybridWorker):
    """Notes what was proposed and what the corpus is told of it."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.sources: set[str] = set()
        self.max_nodes = 0
        self.noted = 0

    def propose(self, batch, floors_B):
        self.copied = self.corpus_trees(batch, floors_B)
        trees = super().propose(batch, floors_B)
        check_trees(trees)
        starts = trees.offsets_B1[:-1][np.diff(trees.offsets_B1) > 0]
        falls = np.diff(trees.probs_N) <= 0
        falls[starts[starts > 0] - 1] = True
        assert falls.all()
        assert (trees.probs_N >= np.float32(floors_B.min())).all()
        self.sources |= {SOURCES[source] for source in trees.sources_N}
        self.max_nodes = max(self.max_nodes, int(np.diff(trees.offsets_B1).max()))
        return trees

    def corpus_trees(self, batch, floors_B):
        """The trees that the corpus proposes alone: asked again it proposes the same."""
        return super(HybridWorker, self).propose(batch, floors_B)

    def _num_verified(self, step):
        found = super()._num_verified(step)
        for b in range(len(step.batch.entries)):
            copied, verified = paths_of(self.copied, b), set(paths_of(step.trees, b))
            held = [path in verified for path in copied]
            assert found[b] == (held.index(False) if False in held else len(held))
            self.noted += int(found[b])
        return found


@pytest.fixture(scope="module")
def plain(tiny_model_path):
    engine = RolloutEngine.from_pretrained(tiny_model_path, "none", max_running=4)
    return engine.generate(PROMPTS, PARAMS)


def hybrid_engine(path, drafter, *, num_draft_tokens=8, learned=False, **overrides):
    def build(config, progress=None):
        target = TargetWorker(config, progress)
        corpus = NgramCorpus(VOCAB, CorpusOptions(corpus_bytes=1 << 24))
        budget = LearnedBudget.for_target(target, SOURCES, 0.02) if learned else FixedBudget(0.02)
        return WatchedWorker(
            target, corpus, drafter, num_draft_tokens=num_draft_tokens, calibration_seconds=0,
            budget=budget,
        )  # fmt: skip

    return RolloutEngine.from_config(engine_config(path, {"max_running": 4, **overrides}), build)


def oracle(plain, *, right=0.7, depth=3):
    known = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in plain}
    return OracleDrafter(known, depth=depth, right=right)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("overrides", [{}, {"chunk_len": 3, "max_kv_tokens": 120}], ids=str)
def test_epochs_of_the_same_prompts(tiny_model_path, plain, learned, overrides):
    drafter = oracle(plain)
    engine = hybrid_engine(tiny_model_path, drafter, learned=learned, **overrides)
    for _ in range(3):
        assert numbers(engine.generate(PROMPTS, PARAMS)) == numbers(plain)
    worker = engine.worker
    assert worker.max_nodes <= 8
    assert drafter.num_observed > 0
    assert drafter.num_released == 3 * len(plain)
    counters = worker.counters()
    assert counters["hybrid/asked"] == counters["draft/asked"]
    assert counters["hybrid/is_open"] in (0.0, 1.0)
    if not learned:  # else what is drafted depends on what this machine's steps cost
        assert {"group", "oracle", "ngram+oracle"} <= worker.sources
        assert worker.noted > 0
        assert counters["hybrid/skipped"] > 0, "the corpus knows every answer by now"
        assert counters["hybrid/gain"] == 0.0, "nothing is known of costs"


def test_agreement_is_learned_as_a_source_of_its_own(tiny_model_path, plain):
    engine = hybrid_engine(tiny_model_path, oracle(plain, right=1.0), learned=True)
    engine.generate(PROMPTS, PARAMS)
    values = engine.worker.learned()["values"]
    assert values["sources"] == list(SOURCES)
    accepted = dict(zip(values["sources"], np.sum(values["accepted"], axis=1), strict=True))
    assert accepted["oracle"] > 0
    assert accepted["ngram+oracle"] > 0


def test_no_more_nodes_than_a_mask_has_bits(tiny_model_path, plain):
    drafter = oracle(plain, depth=30)
    engine = hybrid_engine(tiny_model_path, drafter, num_draft_tokens=63)
    assert numbers(engine.generate(PROMPTS, PARAMS)) == numbers(plain)
    assert numbers(engine.generate(PROMPTS, PARAMS)) == numbers(plain)
