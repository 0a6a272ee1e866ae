"""The parity chain with neural drafts, bit for bit on tokens and logprobs."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.errors import CheckpointError, InvalidInputError
from tests.helpers.draft_checks import check_cuts, check_gates, check_no_distribution, numbers
from tests.helpers.tiny_draft import save_copying_eagle1, save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=20, n=1),
    "sampled": SamplingParams(temperature=0.8, max_new_tokens=20, n=2, seed=5),
    "shaped": SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
        min_new_tokens=8, max_new_tokens=20, seed=6,
        raw_logprobs=True, sampling_logprobs=True, top_logprobs=2, entropy=True,
    ),
    "cut": SamplingParams(
        temperature=0.9, top_k=30, min_p=0.01, presence_penalty=0.4, logit_bias={5: 2.0, 9: -3.0},
        stop_token_ids=[11, 12], max_new_tokens=20, seed=8,
    ),
}  # fmt: skip
FIXED = {"budget": "fixed", "min_probability": 0.0}
LEARNED = {"budget": "learned", "calibration_seconds": 0}


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    shared = random.integers(3, 97, 40).tolist()
    own = [random.integers(3, 97, length).tolist() for length in (1, 5, 33)]
    return [*own, shared, [*shared, 7], [*shared[:20], *own[1]]]


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=1)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, target_path):
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "eagle": save_copying_eagle1(folder / "eagle", target_path),
        "eagle3": save_tiny_eagle3(
            folder / "eagle3", target_path, layers=(0, 1), draft_vocab_size=64, unsorted=True
        ),
    }


@pytest.fixture(scope="module", params=[("eagle", "float32"), ("eagle3", "bfloat16")])
def draft_and_dtype(request):
    return request.param


@pytest.fixture(scope="module")
def draft(draft_and_dtype):
    return draft_and_dtype[0]


@pytest.fixture(scope="module")
def dtype(draft_and_dtype):
    return draft_and_dtype[1]


@pytest.fixture(scope="module")
def plain(target_path, dtype):
    engine = RolloutEngine.from_pretrained(
        target_path, spec="none", dtype=dtype, max_running=1, prefix_cache=False
    )
    return {name: engine.generate(prompts(), params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize(
    ("options", "spec_options"),
    [
        ({"max_running": 3, "chunk_len": 7}, FIXED | {"topk": 1}),
        ({"max_running": 8, "max_kv_tokens": 150}, FIXED | {"num_draft_tokens": 63}),
        ({"max_running": 8, "chunk_len": 17, "max_step_tokens": 24}, LEARNED),
        ({"max_running": 4}, {"lockstep": True, "num_steps": 2, "topk": 8}),
    ],
    ids=str,
)
def test_no_draft_can_be_seen(
    target_path, drafts, draft, dtype, plain, name, options, spec_options
):
    engine = RolloutEngine.from_pretrained(
        target_path, "eagle", dtype=dtype, **options,
        spec_options={"draft_path": str(drafts[draft])} | spec_options,
    )  # fmt: skip
    for _ in range(2):  # the second time in the prefix cache
        rollouts = engine.generate(prompts(), PARAMS[name])
        assert numbers(rollouts) == numbers(plain[name])
        engine.check_integrity()
    assert engine.worker.memory.usage.used == 0
    if draft == "eagle" and spec_options is not LEARNED and name in ("greedy", "sampled"):
        verified = sum(r.stats.verify_steps for r in rollouts)
        assert sum(r.stats.accepted for r in rollouts) > 0.5 * verified


@pytest.mark.parametrize("seed", [1, 2])
def test_no_gate_can_be_seen(target_path, drafts, draft, plain, dtype, seed):
    engine = RolloutEngine.from_pretrained(
        target_path, "eagle", dtype=dtype, max_running=5,
        spec_options={"draft_path": str(drafts[draft])} | LEARNED,
    )  # fmt: skip
    check_gates(engine, prompts(), PARAMS["sampled"], numbers(plain["sampled"]), seed)


def test_a_rollout_cut_anywhere_goes_on_as_if_it_had_not_been(
    target_path, drafts, draft, dtype, plain
):
    engine = RolloutEngine.from_pretrained(
        target_path, "eagle", dtype=dtype, max_running=4,
        spec_options={"draft_path": str(drafts[draft])} | FIXED,
    )  # fmt: skip
    check_cuts(engine, plain["sampled"][::3], PARAMS["sampled"])


def test_logits_that_are_no_distribution_end_a_request_alone(target_path, drafts):
    engine = RolloutEngine.from_pretrained(
        target_path, "eagle", spec_options={"draft_path": str(drafts["eagle3"])} | FIXED
    )
    check_no_distribution(engine, prompts()[1], prompts()[3], PARAMS["greedy"])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"draft_path": None}, "spec.draft_path"),
        ({"budget": "nonsense"}, "spec.budget"),
        ({"min_probability": 1.5}, "spec.min_probability"),
        ({"calibration_seconds": float("nan")}, "spec.calibration_seconds"),
        ({"num_draft_tokens": 64}, "spec.num_draft_tokens"),
        ({"num_steps": 0}, "spec.num_steps"),
        ({"topk": 0}, "spec.topk"),
        ({"topk": 2.0}, "spec.topk"),
        ({"topk": 16, "num_steps": 5}, "spec.topk"),
        ({"nonsense": 1}, "spec.nonsense"),
    ],
)
def test_options_that_cannot_be(target_path, drafts, monkeypatch, options, field):
    """And it is told before the model is loaded."""
    monkeypatch.setattr(
        "spec_workers.eagle.TargetWorker", lambda *args, **options: pytest.fail("loads the model")
    )
    options = {"draft_path": str(drafts["eagle"])} | options
    with pytest.raises(InvalidInputError, match=field.replace(".", r"\.")):
        RolloutEngine.from_pretrained(target_path, "eagle", spec_options=options)
    with pytest.raises(CheckpointError, match="no such folder"):
        RolloutEngine.from_pretrained(target_path, "eagle", spec_options={"draft_path": "nowhere"})
