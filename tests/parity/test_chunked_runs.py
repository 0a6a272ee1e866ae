"""exact=false: long runs of recurrent layers in chunks give the same numbers, but for rounding."""

from __future__ import annotations

import numpy as np
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.ops.gated_delta_rule.chunked import MIN_ROWS, torch_kernel
from tests.helpers.tiny_hybrid import save_tiny_hybrid

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)


def test_long_prompts_in_chunks(tmp_path, monkeypatch) -> None:
    target = save_tiny_hybrid(tmp_path, max_positions=1024)
    random = np.random.default_rng(0)
    lengths = (5, MIN_ROWS + 70, 2 * MIN_ROWS + 3)
    prompts = [random.integers(3, 97, length).tolist() for length in lengths]
    options = {"chunk_len": MIN_ROWS + 60, "max_step_tokens": 600}
    expected = RolloutEngine.from_pretrained(target, "ngram", **options).generate(prompts, PARAMS)

    seen: list[int] = []

    def counted(*inputs):
        seen.extend(inputs[5].lengths_R)
        return torch_kernel(*inputs)

    monkeypatch.setattr("rollout.runner.dummy_run.chunked_kernel", lambda states, dtype: counted)
    engine = RolloutEngine.from_pretrained(target, "ngram", exact=False, **options)
    for _ in range(2):  # the second time in the prefix cache
        for found, plain in zip(engine.generate(prompts, PARAMS), expected, strict=True):
            assert found.token_ids == plain.token_ids
            torch.testing.assert_close(
                torch.tensor(found.logprobs), torch.tensor(plain.logprobs), rtol=1e-3, atol=1e-3
            )
        engine.check_integrity()
    assert max(seen) >= MIN_ROWS
    assert not [length for length in seen if length > options["chunk_len"]]
