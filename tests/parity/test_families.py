"""Windows, sinks, soft caps and norms after a layer's halves: transformers' numbers, which neither
chunks nor company, drafts or cached prefixes change by a bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from tests.helpers.compared import numbers
from tests.helpers.parity_models import FIXED, prompts
from tests.helpers.tiny_families import PARITY, save_tiny_family, tiny_family
from tests.helpers.transformers_answers import assert_logprobs, chosen_experts

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=20, n=2, seed=5)


@pytest.mark.parametrize(("name", "dtype"), PARITY)
def test_nothing_can_be_seen(name, dtype, tmp_path):
    folder = save_tiny_family(tmp_path, name)

    def engine_of(spec: str, **options) -> RolloutEngine:
        return RolloutEngine.from_pretrained(folder, spec, dtype=dtype, **options)

    plain = engine_of("none", max_running=1, prefix_cache=False, window_slots=0)
    rollouts = plain.generate(prompts(), PARAMS)
    if dtype == "float32":
        assert_logprobs(rollouts, tiny_family(name), PARAMS.temperature)
    wanted = numbers(rollouts)
    assert (
        plain.score(rollouts[0].prompt_ids, rollouts[0].token_ids, PARAMS) == rollouts[0].logprobs
    )
    engine = engine_of("none", max_running=5, chunk_len=7, max_step_tokens=24)
    assert numbers(engine.generate(prompts(), PARAMS)) == wanted
    engine.check_integrity()
    engine = engine_of("ngram", max_running=8, spec_options=FIXED | {"num_draft_tokens": 12})
    for _ in range(2):
        assert numbers(engine.generate(prompts(), PARAMS)) == wanted
    assert engine.metrics().accepted > 0
    engine.check_integrity()


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss plain", "qwen3 moe window"])
def test_routers_choose_what_transformers_choose(name, tmp_path):
    """Through chunks, decoding and draft trees."""
    engine = RolloutEngine.from_pretrained(
        save_tiny_family(tmp_path, name), "ngram", dtype="float32", record_routes=True,
        chunk_len=7, num_threads=1, spec_options=FIXED,
    )  # fmt: skip
    rollouts = engine.generate(prompts(), replace(PARAMS, routed_experts=True))
    theirs = tiny_family(name)
    for rollout in rollouts:
        chosen = chosen_experts(theirs, rollout.prompt_ids + rollout.token_ids)
        ours = torch.from_numpy(rollout.routed_experts).long().sort(-1).values
        assert torch.equal(ours, chosen[:-1].sort(-1).values)
