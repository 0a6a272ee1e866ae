"""Neural drafts beside the matrix: gates that flicker, broken logits, and the distribution of what
is emitted."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from rollout import RolloutEngine, SamplingParams
from rollout.config import DType
from rollout.models.loader import load_model
from spec_workers.budget import FixedBudget
from tests.helpers.compared import numbers
from tests.helpers.dense_attention import logits_of
from tests.helpers.draft_checks import check_gates, check_no_distribution
from tests.helpers.parity_models import FIXED, LEARNED, PARAMS, prompts
from tests.helpers.tiny_mtp import save_tiny_mtp

DRAWS = 1500


def make_engine(models, spec, kind, spec_options, **options) -> RolloutEngine:
    return RolloutEngine.from_pretrained(
        models.target("shallow"), spec, **options,
        spec_options={"draft_path": str(models.draft("shallow", kind))} | spec_options,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "seed"), [("eagle", 1), ("eagle3", 2), ("mtp", 1), ("mtp", 2)])
def test_no_gate_can_be_seen(models, kind, seed):
    spec = "mtp" if kind == "mtp" else "eagle"
    engine = make_engine(models, spec, kind, LEARNED, dtype="float32", max_running=5)
    wanted = numbers(models.reference("shallow", "float32", "sampled"))
    check_gates(engine, prompts(), PARAMS["sampled"], wanted, seed)


@pytest.mark.parametrize("spec", ["eagle", "mtp"])
def test_logits_that_are_no_distribution_end_a_request_alone(models, spec):
    engine = make_engine(models, spec, "eagle3" if spec == "eagle" else "mtp", FIXED)
    check_no_distribution(engine, prompts()[0], prompts()[2], PARAMS["greedy"])


@pytest.mark.parametrize("spec", ["eagle", "mtp", "hybrid"])
def test_levels_that_bring_less_than_they_take_are_left_out(models, spec, monkeypatch):
    kind = "mtp" if spec == "mtp" else "eagle"
    levels = {}
    for token_ms in (1e6, 0.0):
        worth = lambda self, batch, ms=token_ms: np.full(len(batch.entries), ms)  # noqa: E731
        monkeypatch.setattr(FixedBudget, "token_ms", worth)
        engine = make_engine(models, spec, kind, FIXED, dtype="float32", max_running=3)
        wanted = numbers(models.reference("shallow", "float32", "greedy"))
        assert numbers(engine.generate(prompts(), PARAMS["greedy"])) == wanted
        engine.check_integrity()
        counters = engine.worker.counters()
        assert counters["draft/trees"] > 10
        levels[token_ms] = counters["draft/levels"] / counters["draft/trees"]
    assert levels[1e6] > 1.2 * levels[0.0]


def test_what_is_emitted_follows_the_target(tmp_path):
    """Two tokens of each of many samples, against the exact joint distribution."""
    vocab, prompt = 7, [3, 5, 1]
    folder, _ = save_tiny_mtp(
        tmp_path, "mimo", 2, likely=True, vocab_size=vocab, num_layers=1, sharpness=2.0
    )
    model = load_model(folder, DType.float32, torch.device("cpu"))
    sequences = [[*prompt, token] for token in range(vocab)]
    first, second = (
        np.stack([logits[at].softmax(0).double().numpy() for logits in logits_of(model, sequences)])
        for at in (-2, -1)
    )
    engine = RolloutEngine.from_pretrained(
        folder, "mtp", max_running=64, spec_options=FIXED | {"topk": 3}
    )
    params = SamplingParams(max_new_tokens=3, n=1500, seed=1, ignore_eos=True)
    rollouts = engine.generate([prompt], params)
    assert sum(r.stats.accepted for r in rollouts) > 500
    counts = np.zeros((vocab, vocab))
    np.add.at(counts, tuple(np.array([r.token_ids[:2] for r in rollouts]).T), 1)
    expected = (first[0][:, None] * second * len(rollouts)).ravel()
    assert stats.chisquare(counts.ravel(), expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_pairs_of_tokens_follow_the_target(models):
    """By the target's own probabilities, renormalised as it samples."""
    params = SamplingParams(
        temperature=2.0, top_k=5, max_new_tokens=2, n=DRAWS, seed=2, ignore_eos=True,
        sampling_logprobs=True,
    )  # fmt: skip
    options = {"budget": "fixed", "min_probability": 0.005}
    engine = make_engine(models, "hybrid", "eagle3", options, dtype="float32", max_running=32)
    rollouts = engine.generate([prompts()[0]], params)
    assert sum(rollout.stats.accepted for rollout in rollouts) > DRAWS / 10
    counts = Counter(tuple(rollout.token_ids) for rollout in rollouts)
    probability = {
        tuple(r.token_ids): float(np.exp(sum(r.extras.sampling_logprobs))) for r in rollouts
    }
    often = [pair for pair in counts if probability[pair] * DRAWS >= 5]
    observed = [counts[pair] for pair in often]
    expected = [probability[pair] * DRAWS for pair in often]
    rest = 1.0 - sum(expected) / DRAWS
    assert rest > -1e-6
    if rest * DRAWS >= 1:
        observed.append(DRAWS - sum(observed))
        expected.append(rest * DRAWS)
    expected = np.array(expected) * sum(observed) / sum(expected)
    assert len(often) > 5
    assert stats.chisquare(observed, expected).pvalue > 1e-4
