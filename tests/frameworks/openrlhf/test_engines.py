"""The actors in Ray, with GPUs that Ray only believes in."""

from __future__ import annotations

import os

import pytest
import ray

from rollout.trainers.openrlhf import stand_ins
from rollout.trainers.openrlhf.arguments import TrainerArguments
from rollout.trainers.openrlhf.engines import create_engines
from rollout.trainers.openrlhf.options import OwnOptions
from tests.frameworks.shared.ray_sessions import own_ray
from tests.helpers.text_model import save_text_model

pytestmark = pytest.mark.timeout(6600)


@pytest.fixture
def _ray_that_hides_no_gpu(monkeypatch):
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hook = {"worker_process_setup_hook": stand_ins.SETUP_HOOK}
    with own_ray(num_cpus=4, num_gpus=2, runtime_env=hook):
        yield


@pytest.mark.usefixtures("_ray_that_hides_no_gpu")
def test_each_engine_sees_the_gpu_that_ray_gave_it(tmp_path):
    engines = create_engines(
        OwnOptions(spec="none", overrides={"kv_bytes": 2_000_000}),
        TrainerArguments(sync_backend="gloo", dtype="float32", resumed_from=""),
        num_engines=2,
        tensor_parallel_size=1,
        pretrain=str(save_text_model(tmp_path)),
        seed=3,
        full_determinism=False,
        enable_prefix_caching=True,
        enforce_eager=True,
        max_model_len=64,
    )
    seen = [
        engine.__ray_call__.remote(lambda actor: os.environ["CUDA_VISIBLE_DEVICES"])
        for engine in engines
    ]
    assert sorted(ray.get(seen)) == ["0", "1"]
