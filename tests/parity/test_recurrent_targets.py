"""Targets with gated delta rule layers: transformers' numbers, and drafts that cannot be seen."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.trainers import weight_source
from tests.helpers.draft_checks import numbers
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_hybrid import save_tiny_chain, tiny_hybrid
from tests.parity.test_eagle_chain import FIXED, PARAMS, prompts

OPTIONS = {"max_running": 3, "chunk_len": 7}


@pytest.fixture(
    scope="module",
    params=[("qwen3_5", False), ("qwen3_next", True)],
    ids=["qwen3_5", "qwen3_next experts"],
)
def make(request):
    family, experts = request.param
    return partial(tiny_hybrid, family, experts=experts)


@pytest.fixture(scope="module")
def target(make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_tiny_chain(folder, *make.args, **make.keywords)
    return folder


@pytest.fixture(scope="module")
def plain(target):
    engine = RolloutEngine.from_pretrained(target, "none", max_running=1, prefix_cache=False)
    return {name: engine.generate(prompts(), PARAMS[name]) for name in ("greedy", "shaped")}


def test_logprobs_are_those_of_transformers(make, target):
    theirs = make()
    engine = RolloutEngine.from_pretrained(target, "none", **OPTIONS)
    params = SamplingParams(max_new_tokens=30, seed=3, n=2)
    for rollout in engine.generate(prompts(), params):
        prompt = prompts()[rollout.prompt_index]
        tokens = [*prompt, *rollout.token_ids]
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor([rollout.token_ids]).T)[:, 0]
        torch.testing.assert_close(
            torch.tensor(rollout.logprobs), expected, rtol=1e-4, atol=1e-4, check_dtype=False
        )


@pytest.fixture(scope="module")
def eagle3(target, tmp_path_factory):
    return save_tiny_eagle3(tmp_path_factory.mktemp("eagle3"), target, layers=(1, 2, 4))


@pytest.mark.parametrize("name", ["greedy", "shaped"])
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("mtp", FIXED | {"topk": 4, "num_draft_tokens": 24}),
        ("eagle", FIXED | {"topk": 4, "num_draft_tokens": 16}),
    ],
    ids=["mtp", "eagle3"],
)
def test_no_draft_can_be_seen(target, eagle3, plain, spec, options, name):
    draft_path = target if spec == "mtp" else eagle3
    engine = RolloutEngine.from_pretrained(
        target, spec, **OPTIONS, spec_options={"draft_path": str(draft_path)} | options
    )
    for _ in range(2):  # the second time in the prefix cache
        rollouts = engine.generate(prompts(), PARAMS[name])
        assert numbers(rollouts) == numbers(plain[name])
        engine.check_integrity()
    assert sum(rollout.stats.drafted for rollout in rollouts) > 0


def test_a_trainers_update_is_a_load(make, target, tmp_path):
    """The trainer's model comes without MTP heads, which stay; cached states go with their KV."""
    spec_options = FIXED | {"draft_path": str(target)}
    engine = RolloutEngine.from_pretrained(target, "mtp", **OPTIONS, spec_options=spec_options)
    old = numbers(engine.generate(prompts(), PARAMS["greedy"]))
    trainer = make(seed=1)
    engine.update_weights_from_tensor(weight_source(trainer), selector="target")
    trainer.save_pretrained(tmp_path)
    fresh = RolloutEngine.from_pretrained(tmp_path, "none", **OPTIONS)
    new = numbers(engine.generate(prompts(), PARAMS["greedy"]))
    assert new == numbers(fresh.generate(prompts(), PARAMS["greedy"]))
    assert new != old
    engine.check_integrity()
