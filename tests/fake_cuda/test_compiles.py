"""Every kernel that a step launches compiles for Hopper exactly as it is launched there."""

from __future__ import annotations

import os

import pytest

from rollout import SamplingParams
from tests.fake_cuda.test_steps import PLAIN, PROMPTS, SHAPED
from tests.helpers.fake_cuda import FakeGpu
from tests.helpers.fake_cuda.launches import MOST_SHARED, Launch, compiled
from tests.helpers.fake_cuda.models import MODELS, make_engine

EXHAUSTIVE = bool(os.environ.get("SPECROLLOUT_EXHAUSTIVE"))


@pytest.mark.parametrize("model", MODELS if EXHAUSTIVE else ["8b", "recurrent"])
def test_what_is_launched_compiles(gpu: FakeGpu, tmp_path, model) -> None:
    engine = make_engine(tmp_path, model, exact=model != "recurrent", nodes=7, max_running=6)
    asked: list[SamplingParams] = [PLAIN, SHAPED] if EXHAUSTIVE else [SHAPED]
    for params in asked:
        engine.generate(PROMPTS, params)
    launches = gpu.launches.distinct()
    assert len(launches) > 15
    for launch in launches if EXHAUSTIVE else one_of_each(launches):
        found = compiled(launch)
        assert found.shared_bytes <= MOST_SHARED, launch
        assert found.registers * 32 * found.num_warps <= 65_536, launch


def one_of_each(launches: list[Launch]) -> list[Launch]:
    """Of each kernel the last, which is that of a graph where there is one."""
    return list({launch.name: launch for launch in launches}.values())
