"""Blocks of logits: even, whole, and of no effect on what is generated."""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.runner import logit_blocks
from tests.helpers.compared import numbers

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [11] * 20, [3]]
PARAMS = SamplingParams(
    temperature=0.9, top_p=0.9, presence_penalty=0.2, max_new_tokens=12, n=3, seed=4,
    top_logprobs=2, entropy=True,
)  # fmt: skip


@pytest.mark.parametrize("num_rows", [0, 1, 1024, 1025, 5000, 17_408])
def test_blocks_are_even_and_cover_all_rows(num_rows):
    blocks = list(logit_blocks.logit_blocks(num_rows))
    rows = [row for block in blocks for row in range(block.start, block.stop)]
    assert rows == list(range(num_rows))
    sizes = [block.stop - block.start for block in blocks]
    assert max(sizes) <= logit_blocks.MAX_ROWS
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == max(1, -(-num_rows // logit_blocks.MAX_ROWS))


def test_rollouts_and_scores_are_those_of_whole_logits(tiny_model_path, monkeypatch):
    def results():
        options = {"budget": "fixed", "min_probability": 0.0, "calibration_seconds": 0.0}
        engine = RolloutEngine.from_pretrained(tiny_model_path, spec_options=options, num_threads=1)
        rollouts = [*engine.generate(PROMPTS, PARAMS), *engine.generate(PROMPTS, PARAMS)]
        scored = engine.score(rollouts[0].prompt_ids, rollouts[0].token_ids, PARAMS)
        assert engine.metrics().accepted > 0
        return numbers(rollouts), scored

    whole = results()
    monkeypatch.setattr(logit_blocks, "MAX_ROWS", 11)
    assert results() == whole
