"""Planted faults of the demo model are the first suspect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.trainers.exact import exact_forward
from rollout.trainers.mismatch import Cause, compare
from tests.helpers.planted_faults import FAULTS, planted

PROMPTS = ["Tell me a story about a fox.", "Explain gravity to a child."]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request, demo_model_path: Path) -> Iterator[RolloutEngine]:
    found = RolloutEngine.from_pretrained(demo_model_path, spec="none", dtype=request.param)
    yield found
    found.close()


def rollouts(engine: RolloutEngine, temperature: float = 1.0) -> list[Rollout]:
    params = SamplingParams(max_new_tokens=24, temperature=temperature, ignore_eos=True)
    return engine.generate(PROMPTS, params)


def opened(engine: RolloutEngine, folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=engine.worker.model_dtype).eval()


@pytest.mark.parametrize("cause", [cause for cause in FAULTS if cause != "router"])
def test_the_first_suspect_is_the_fault(
    engine: RolloutEngine, demo_model_path: Path, cause: str
) -> None:
    is_wide = engine.worker.model_dtype.itemsize == 4
    if (cause == "rounding") == is_wide:
        return  # float32's is no mismatch, and the other faults are planted in float32
    found = rollouts(engine, 0.7 if cause == "sampling" else 1.0)
    with planted(cause, opened(engine, demo_model_path)) as model:
        padding = 5 if cause == "positions" else 0
        suspects = compare(model, engine, found, left_padding=padding).suspects
    assert [str(each.cause) for each in suspects][:1] == [cause], suspects


def test_a_clean_pair_has_no_suspect_but_rounding(
    engine: RolloutEngine, demo_model_path: Path
) -> None:
    found = compare(opened(engine, demo_model_path), engine, rollouts(engine))
    is_wide = engine.worker.model_dtype.itemsize == 4
    assert [each.cause for each in found.suspects] == ([] if is_wide else [Cause.ROUNDING])
    assert found.engine_difference == 0


def test_exact_training_has_no_difference(engine: RolloutEngine, demo_model_path: Path) -> None:
    model = opened(engine, demo_model_path)
    with exact_forward(model):
        found = compare(model, engine, rollouts(engine))
    assert (found.max_difference, found.max_logit_difference, found.suspects) == (0, 0, [])
    assert {op.difference for op in found.ops} == {0}
