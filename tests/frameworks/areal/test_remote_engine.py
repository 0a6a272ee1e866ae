"""AReaL's own remote engine, unmodified, against the server: what it asks for and reads back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from areal.api import ModelAllocation, ModelRequest, ParamSpec, WeightUpdateMeta
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.core.distributed import init_custom_process_group
from areal.engine.sglang_remote import RemoteSGLangEngine, SGLangBackend
from areal.infra.remote_inf_engine import _init_weights_update_group_remote
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.ports import free_port
from tests.helpers.text_model import save_text_model
from tests.server.conftest import Live, run_server
from tests.server.policies import PROMPT, Policy, policy

GROUP = "update_weight_group"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("areal")


@pytest.fixture(scope="module")
def second(root: Path) -> Policy:
    return policy(root / "second", 1)


@pytest.fixture(scope="module")
def live(root: Path) -> Iterator[Live]:
    model = save_text_model(root / "model", max_positions=512)
    with run_server(model, {"num_threads": 1}, {"weights_root": str(root)}) as live:
        yield live


@pytest.fixture
def remote(live: Live, root: Path) -> Iterator[RemoteSGLangEngine]:
    config = InferenceEngineConfig(
        backend="sglang:d1",
        experiment_name="experiment",
        trial_name="trial",
        fileroot=str(root),
        request_retries=1,
        setup_timeout=HANG_SECONDS,
        max_concurrent_rollouts=4,
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize("test", live.url.removeprefix("http://"), train_data_parallel_size=1)
    yield engine
    engine.destroy()


def generate(engine: RemoteSGLangEngine, tokens: int = 12):
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, greedy=True, ignore_eos=True)
    return asyncio.run(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig)))


def greedy(folder: Path) -> list[int]:
    engine = RolloutEngine.from_pretrained(folder, spec="none", num_threads=1)
    params = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    return engine.generate([PROMPT], params)[0].token_ids


def test_generation(remote, live, root):
    response = generate(remote)
    assert response.output_tokens == greedy(root / "model")
    assert len(response.output_logprobs) == 12
    assert response.stop_reason == "length"


def test_a_rollout_that_a_pause_cuts_goes_on_after_it(remote, live):
    """AReaL resubmits the prompt with what it has, and gets the tokens of an undisturbed one."""
    whole = generate(remote, 300).output_tokens
    cut = threading.Thread(target=lambda: found.append(generate(remote, 300)))
    found: list = []
    cut.start()
    wait_until(lambda: live.serving.loop.num_unfinished)
    remote.pause()  # its clients wait before they submit again
    remote.pause_generation()
    remote.continue_generation()
    remote.resume()
    cut.join(HANG_SECONDS)
    assert found[0].output_tokens == whole


def test_weights_through_a_group(remote, live, root, second):
    """The calls of AReaL's FSDP engine, over gloo: several buckets between pause and continue."""
    allocation = ModelAllocation.from_str("sglang:d1", name="rollout")
    meta = WeightUpdateMeta(
        type="xccl", gen_allocation=allocation, nccl_master_address="127.0.0.1",
        nccl_master_port=free_port(), nccl_group_name=GROUP,
    )  # fmt: skip
    joining = threading.Thread(
        target=_init_weights_update_group_remote,
        args=(SGLangBackend(), meta, remote._engine.addresses, HANG_SECONDS),
    )
    joining.start()
    group = init_custom_process_group(
        backend="gloo", world_size=2, rank=0, group_name=GROUP,
        init_method=f"tcp://127.0.0.1:{meta.nccl_master_port}",
    )  # fmt: skip
    joining.join(HANG_SECONDS)
    try:
        for folder in (second.folder, root / "model"):
            remote.pause_generation()
            for bucket in buckets_of(folder, 10_000):
                specs = [
                    ParamSpec(name, tuple(tensor.shape), str(tensor.dtype).split("torch.")[1])
                    for name, tensor in bucket
                ]
                done = remote.update_weights_from_distributed(meta, specs)
                for _, tensor in bucket:
                    dist.broadcast(tensor, src=0, group=group)
                done.result(HANG_SECONDS)
            remote.continue_generation()
            assert generate(remote).output_tokens == greedy(folder)
    finally:
        dist.destroy_process_group(group)
        with live.client() as client:
            client.post("/destroy_weights_update_group", json={"group_name": GROUP})


def buckets_of(folder: Path, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket, size = [], 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket
