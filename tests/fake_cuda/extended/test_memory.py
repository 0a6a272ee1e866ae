"""The memory of the largest step, at sizes that trainers use."""

from __future__ import annotations

from rollout.runner.dummy_run import DummyRun
from tests.helpers.fake_cuda import FakeGpu
from tests.helpers.fake_cuda.models import make_engine
from tests.helpers.live_bytes import LiveBytes

RUNNING, STEP_TOKENS, NODES = 1024, 8192, 16
VOCAB = 151_936


def test_a_step_of_verls_defaults_takes_little(gpu: FakeGpu, tmp_path) -> None:
    """1,024 requests with 16 draft nodes each sample at 17,408 rows, every one of them edited."""
    model = make_engine(tmp_path, "qwen3-8b", nodes=NODES).worker.target.model
    steps = DummyRun(model)
    rows, sampled = STEP_TOKENS + RUNNING * NODES, RUNNING * (1 + NODES)
    with LiveBytes() as forward:
        hidden_TE = steps.forward(rows, nodes=rows)
    with LiveBytes() as sampling:
        steps.sample(hidden_TE, sampled)
    sizes = {
        "a forward": forward.peak,
        "sampling": sampling.peak,
        "whole logits": 4 * sampled * VOCAB,
    }
    print(*(f"{what}: {size / 2**30:.2f} GiB" for what, size in sizes.items()), sep="; ")
    assert sampling.peak < 3 << 30
