"""The hybrid worker: its questions to the draft, its proposals, and its reports to the corpus."""

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
    """A stand-in for `NeuralDrafter` that knows the rollouts, and sometimes names a wrong token."""

    sources = ("oracle",)
    features = AuxHiddenStates()
    lockstep = False
    is_warm = True

    def __init__(self, recorded, *, depth, right) -> None:
        """
        Args:
            recorded: (prompt_index, sample_index) -> all tokens of that rollout, prompt included.
            depth: of its chains.
            right: the probability of each token to be the recorded one.
        """
        self._recorded = recorded
        self._depth = depth
        self._right = right
        self._rng = np.random.default_rng(0)
        self.max_draft_tokens = depth
        self.num_asked = self.num_observed = self.num_released = 0

    def propose(self, batch, floors_B, entries, token_ms_B=None):
        shapes, probs = [], []
        for b, entry in enumerate(batch.entries):
            tokens = []
            if entry.samples and b in entries:
                self.num_asked += 1
                request = entry.request
                known = self._recorded[request.prompt_index, request.sample_index]
                room = min(self._depth, len(entry.draft_slots))
                next_tokens = known[len(request.tokens) :][:room]
                wrong_K = self._rng.random(len(next_tokens)) >= self._right
                tokens = ((np.array(next_tokens, dtype=int) + wrong_K) % VOCAB).tolist()
            shapes.append((tokens, list(range(len(tokens)))))
            probs += [0.8 ** (k + 1) for k in range(len(tokens))]
        trees = make_trees(shapes)
        trees.probs_N = np.array(probs, dtype=np.float32)
        return trees

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
    """Checks and notes each proposal, and the number of its nodes that the corpus learns from."""

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


def oracle(plain, *, right=0.7, depth=5):
    known = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in plain}
    return OracleDrafter(known, depth=depth, right=right)


@pytest.mark.parametrize(
    ("learned", "overrides"), [(False, {}), (True, {"chunk_len": 3, "max_kv_tokens": 120})]
)
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
    if learned:
        values = worker.learned()["calibration"]
        assert values["sources"] == list(SOURCES)
        accepted = dict(zip(values["sources"], np.sum(values["accepted"], axis=1), strict=True))
        assert accepted["oracle"] > 0
        assert accepted["ngram+oracle"] > 0
    else:  # with a learned budget drafts depend on this machine's times
        assert {"group", "oracle", "ngram+oracle"} <= worker.sources
        assert worker.noted > 0
        assert counters["hybrid/skipped"] > 0, "the corpus knows every answer by now"
        assert counters["hybrid/gain"] == 0.0, "nothing is known of costs"


def test_deep_drafts_have_at_most_as_many_nodes_as_a_mask_has_bits(tiny_model_path, plain):
    drafter = oracle(plain, depth=60)
    engine = hybrid_engine(tiny_model_path, drafter, num_draft_tokens=63)
    assert numbers(engine.generate(PROMPTS, PARAMS)) == numbers(plain)
    assert numbers(engine.generate(PROMPTS, PARAMS)) == numbers(plain)
