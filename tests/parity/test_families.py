"""Windows, sinks, soft caps and norms after a layer's halves: transformers' numbers, which neither
chunks nor company, drafts or cached prefixes change by a bit."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from tests.helpers.compared import numbers
from tests.helpers.parity_models import FIXED, prompts
from tests.helpers.tiny_families import PARITY, save_tiny_family, tiny_family
from tests.helpers.transformers_answers import assert_logprobs

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
