"""A step on a GPU waits once, for what it reads, and asks for nothing that cannot be had there.

Every kernel that it launches compiles for Hopper exactly as it is launched, and all that it may
launch for a row add it up in the same order.
"""

from __future__ import annotations

import pytest

from rollout import RolloutEngine, SamplingParams
from tests.helpers.additions import differing_sums
from tests.helpers.fake_cuda import FakeGpu, Kind, Seen
from tests.helpers.fake_cuda.models import MODELS, make_engine
from tests.helpers.triton_compile import MAX_REGISTERS, MAX_SHARED, compiled

PLAIN = SamplingParams(max_new_tokens=4, ignore_eos=True, seed=3, n=2)
SHAPED = SamplingParams(
    temperature=1.1, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.1,
    presence_penalty=0.1, logit_bias={5: 2.0}, min_new_tokens=3, max_new_tokens=4, n=2, seed=6,
    raw_logprobs=True, sampling_logprobs=True, top_logprobs=3, entropy=True,
)  # fmt: skip
WAITS = 2  # for what is read, and for the end of the forward, which came before it
CASES = [("8b", False), ("odd", True), ("recurrent", True), ("latent", True), ("windows", False)]
COMPILED = ("recurrent", True)  # every kernel of the other cases too
PROMPTS = [[5, 6, 7], list(range(3, 400)), [8] * 65]


@pytest.mark.parametrize(("model", "exact"), CASES)
def test_a_step_waits_once(gpu: FakeGpu, tmp_path, model, exact) -> None:
    """Prefill in chunks, decoding with and without trees, with all that sampling can be asked."""
    routes = "num_experts_per_tok" in MODELS[model]
    options = {"exact": exact, "nodes": 7, "max_running": 6, "record_routes": routes}
    if model == "recurrent":  # a warm-up of 8192 rows is many chunks, and a prompt here none of it
        options["max_step_tokens"] = 1024
    engine = make_engine(tmp_path, model, **options)
    warm = {launch.key for launch in gpu.launches.all}
    steps = run(gpu, engine, SHAPED)
    if model in ("8b", "odd"):  # logits of the model's own dtype, which no layer decides
        steps += run(gpu, engine, PLAIN)
    waits = WAITS + routes
    for seen in steps:
        assert not [str(event) for event in seen.of(Kind.STALL, Kind.FORBIDDEN)]
        assert len(seen.of(Kind.STREAM_WAIT)) == len(seen.of(Kind.CAPTURE))
        assert len(seen.of(Kind.EVENT_WAIT)) <= waits
        assert len(seen.of(Kind.READ)) <= 1 + routes
    assert not {problem for launch in gpu.launches.all for problem in launch.problems}
    assert (engine.worker.memory.windows is not None) == (model == "windows")
    graphs = engine.worker.target.graphs
    if graphs is not None:
        assert not graphs.graph_runner.failure
        assert gpu.seen.of(Kind.REPLAY)
    later = [launch.name for launch in gpu.launches.distinct() if launch.key not in warm]
    assert not later, "compiled after the warm-up"
    assert not differing_sums(gpu.launches.distinct())
    if (model, exact) == COMPILED:
        kernels = {launch.name: launch for launch in gpu.launches.distinct()}  # a graph's, if any
        assert len(kernels) > 15
        for launch in kernels.values():
            found = compiled(launch.source, launch.options)
            assert found.shared <= MAX_SHARED, launch
            assert found.registers * 32 * found.num_warps <= MAX_REGISTERS, launch


def run(gpu: FakeGpu, engine: RolloutEngine, params: SamplingParams) -> list[Seen]:
    """The events that each step of some requests causes on the device."""
    for index, prompt in enumerate(PROMPTS):
        engine.submit(prompt, params, prompt_index=index)
    steps = []
    while engine.has_unfinished:
        with gpu.seen.since() as seen:
            engine.step()
        steps.append(seen)
    engine.check_integrity()
    return steps
