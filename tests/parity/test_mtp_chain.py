"""The parity chain with MTP chains, bit for bit on tokens and logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rollout import RolloutEngine, SamplingParams
from rollout.config import DType
from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.loader import load_model
from tests.helpers.dense_attention import logits_of
from tests.helpers.draft_checks import check_cuts, check_gates, check_no_distribution, numbers
from tests.helpers.tiny_model import save_tiny_llama
from tests.helpers.tiny_mtp import save_tiny_mtp
from tests.parity.test_eagle_chain import FIXED, LEARNED, PARAMS, prompts


@pytest.fixture(
    scope="module",
    params=[("mimo", "float32"), ("separate", "bfloat16")],
    ids=str,
)
def chain(request, tmp_path_factory):
    """Folders of target and chain, and a dtype."""
    layout, dtype = request.param
    folder = tmp_path_factory.mktemp(layout)
    own_head = 48 if layout == "separate" else None
    return *save_tiny_mtp(folder, layout, 3, likely=True, own_head=own_head), dtype


@pytest.fixture(scope="module")
def plain(chain):
    target, _, dtype = chain
    engine = RolloutEngine.from_pretrained(
        target, spec="none", dtype=dtype, max_running=1, prefix_cache=False
    )
    return {name: engine.generate(prompts(), params) for name, params in PARAMS.items()}


def make_engine(chain, spec_options, **options):
    target, draft, dtype = chain
    return RolloutEngine.from_pretrained(
        target, "mtp", dtype=dtype, **options,
        spec_options={"draft_path": str(draft)} | spec_options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "spec_options"),
    [
        ({"max_running": 3, "chunk_len": 7}, FIXED | {"lockstep": True}),
        ({"max_running": 8, "max_kv_tokens": 150}, FIXED | {"topk": 4, "num_draft_tokens": 24}),
        ({"max_running": 8, "chunk_len": 17, "max_step_tokens": 24}, LEARNED | {"num_steps": 5}),
    ],
    ids=str,
)
def test_no_chain_can_be_seen(chain, plain, options, spec_options):
    engine = make_engine(chain, spec_options, **options)
    accepted = verified = 0
    for name in ("sampled", "greedy", "shaped", "cut"):  # the first fills the prefix cache
        rollouts = engine.generate(prompts(), PARAMS[name])
        assert numbers(rollouts) == numbers(plain[name])
        engine.check_integrity()
        accepted += sum(r.stats.accepted for r in rollouts)
        verified += sum(r.stats.verify_steps for r in rollouts)
    assert engine.worker.memory.usage.used == 0
    assert accepted > 0.1 * verified or spec_options["budget"] == "learned"


@pytest.mark.parametrize("seed", [1, 2])
def test_no_gate_can_be_seen(chain, plain, seed):
    engine = make_engine(chain, LEARNED, max_running=5)
    check_gates(engine, prompts(), PARAMS["sampled"], numbers(plain["sampled"]), seed)


def test_a_rollout_cut_anywhere_goes_on_as_if_it_had_not_been(chain, plain):
    engine = make_engine(chain, FIXED, max_running=4)
    check_cuts(engine, plain["sampled"][::3], PARAMS["sampled"])


def test_logits_that_are_no_distribution_end_a_request_alone(chain):
    engine = make_engine(chain, FIXED)
    check_no_distribution(engine, prompts()[1], prompts()[3], PARAMS["greedy"])


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


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"budget": "nonsense"}, "spec.budget"),
        ({"min_probability": 1.5}, "spec.min_probability"),
        ({"calibration_seconds": float("nan")}, "spec.calibration_seconds"),
        ({"num_draft_tokens": 64}, "spec.num_draft_tokens"),
        ({"num_steps": 0}, "spec.num_steps"),
        ({"topk": 0}, "spec.topk"),
        ({"topk": 32}, "spec.topk"),  # of three steps
        ({"topk": 16, "num_steps": 5}, "spec.topk"),
        ({"nonsense": 1}, "spec.nonsense"),
    ],
)
def test_options_that_cannot_be(tmp_path, monkeypatch, options, field):
    """And it is told before the model is loaded."""
    folder, _ = save_tiny_mtp(tmp_path, "mimo", 3)
    monkeypatch.setattr(
        "spec_workers.multi_layer_eagle.TargetWorker", lambda *_, **__: pytest.fail("loads it")
    )
    with pytest.raises(InvalidInputError, match=field.replace(".", r"\.")):
        RolloutEngine.from_pretrained(folder, "mtp", spec_options=options)
    with pytest.raises(CheckpointError, match="no MTP chain"):
        RolloutEngine.from_pretrained(save_tiny_llama(tmp_path / "plain"), "mtp")
