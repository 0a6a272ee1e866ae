"""No hybrid draft can be seen: bit for bit what plain decoding gives, and its distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from rollout import RolloutEngine, SamplingParams
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp

VOCAB = 97
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=24),
    "sampled": SamplingParams(temperature=0.8, max_new_tokens=24, n=3, seed=5),
    "shaped": SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, min_new_tokens=8, max_new_tokens=24,
        n=2, seed=6, sampling_logprobs=True,
    ),
}  # fmt: skip
DRAWS = 1500


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    shared = random.integers(3, VOCAB, 23).tolist()
    own = [random.integers(3, VOCAB, length).tolist() for length in (1, 2, 17)]
    return [*own, shared, [*shared, 9], shared[:12]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By the kind of draft: the target's, always of the same weights, and the draft's."""
    folder = tmp_path_factory.mktemp("hybrid")
    target = save_tiny_llama(folder / "plain", vocab_size=VOCAB)
    eagle3 = save_tiny_eagle3(folder / "eagle3", target, draft_vocab_size=40, unsorted=True)
    with_heads, _ = save_tiny_mtp(folder / "heads", "qwen3_next")
    return {
        "eagle3": (target, str(eagle3)),
        "chain": (target, str(save_tiny_mtp(folder / "chain", "separate", own_head=40)[1])),
        "heads": (with_heads, None),
    }


@pytest.fixture(scope="module")
def plain(folders, dtype):
    engine = RolloutEngine.from_pretrained(folders["eagle3"][0], "none", dtype=dtype, max_running=1)
    return {name: numbers(engine.generate(prompts(), params)) for name, params in PARAMS.items()}


def numbers(rollouts):
    return [(r.token_ids, r.logprobs, r.finish_reason, r.extras) for r in rollouts]


def hybrid(target_path, draft_path, **overrides):
    own = {"draft_path": draft_path, "min_probability": 0.005, "calibration_seconds": 0}
    options = own | overrides.pop("spec_options", {})
    return RolloutEngine.from_pretrained(target_path, "hybrid", spec_options=options, **overrides)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    ("kind", "budget", "options"),
    [
        ("eagle3", "learned", {}),
        ("eagle3", "fixed", {"chunk_len": 7, "max_step_tokens": 11}),
        ("chain", "fixed", {"max_kv_tokens": 100}),
        ("heads", "learned", {}),
    ],
    ids=str,
)
def test_no_hybrid_draft_can_be_seen(folders, dtype, plain, name, kind, budget, options):
    engine = hybrid(
        *folders[kind], dtype=dtype, max_running=4, spec_options={"budget": budget}, **options
    )
    for _ in range(2):  # the corpus knows every answer the second time
        rollouts = engine.generate(prompts(), PARAMS[name])
        assert numbers(rollouts) == plain[name]
        engine.check_integrity()
        assert engine.worker.memory.usage.used == 0
    if budget == "fixed":
        assert sum(rollout.stats.accepted for rollout in rollouts) > len(rollouts)
        assert engine.worker.counters()["draft/trees"] > 0


def test_pairs_of_tokens_follow_the_target(folders):
    """By the target's own probabilities, renormalised as it samples."""
    params = SamplingParams(
        temperature=1.0, top_k=5, max_new_tokens=2, n=DRAWS, seed=2, ignore_eos=True,
        sampling_logprobs=True,
    )  # fmt: skip
    engine = hybrid(
        *folders["eagle3"], dtype="float32", max_running=32, spec_options={"budget": "fixed"}
    )
    rollouts = engine.generate([prompts()[2]], params)
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
