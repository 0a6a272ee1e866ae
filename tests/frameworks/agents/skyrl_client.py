"""SkyRL's clients, unmodified: rollouts, updates by its deltas, through a group and by adapters.

Run in an environment that has its package: ``python skyrl_client.py URL MODEL TENSORS ADAPTER``.
``TENSORS``: a file of the weights that an update brings; versions are published beside it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers.ports import free_port
from tests.helpers.torch_trainer import TorchTrainer

# The package's parent imports its training service, which these clients do not need.
_backends = ModuleType("skyrl.backends")
_skyrl = importlib.util.find_spec("skyrl")
assert _skyrl is not None
assert _skyrl.submodule_search_locations is not None
_backends.__path__ = [str(Path(_skyrl.submodule_search_locations[0]) / "backends")]
sys.modules["skyrl.backends"] = _backends

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.weight_sync.control_plane import (  # noqa: E402
    SkyrlWeightSyncClient,
    nccl_init_payloads,
)
from skyrl.backends.skyrl_train.weight_sync.delta.checkpoint import (  # noqa: E402
    DeltaCheckpointPublisher,
)

PROMPTS = [[5, 9, 11], [7, 8]]
SAMPLING = {"max_tokens": 9, "temperature": 0.9, "logprobs": 0, "seed": 4, "min_tokens": 9}


def follow_deltas(url: str, model: str, tensors: dict[str, torch.Tensor], root: Path) -> None:
    """Two versions by the calls of SkyRL's delta backend, the second of which is the tensors."""
    client = SkyrlWeightSyncClient([url])
    source = str(root / "published")
    publisher = DeltaCheckpointPublisher(model, source, str(root / "staging"))
    client.init_weight_transfer_engine(
        {
            "base_model_path": model, "local_checkpoint_dir": str(root / "followed"),
            "cloud_download_workers": 4, "multi_thread_safetensors_max_workers": 8,
            "checkpoint_load_format": "vllm_multi_thread_safetensors",
        }
    )  # fmt: skip
    for scale in (2.0, 1.0):
        new = {name: scale * tensor for name, tensor in tensors.items()}
        published = publisher.publish(publisher.create_delta_files(new.items()))
        client.fetch_weights(published["target_version"], published["sync_dir"], published["uri"])
        client.pause_generation()
        client.reset_prefix_cache(reset_running_requests=True)
        client.start_weight_update()
        client.update_weights(published)
        client.finish_weight_update()
        client.resume_generation()
    client.close()


def send_through_group(url: str, tensors: dict[str, torch.Tensor]) -> None:
    """The calls of SkyRL's NCCL backend, over gloo: its own needs GPUs."""
    client = SkyrlWeightSyncClient([url], init_payload_fn=nccl_init_payloads)
    port = free_port()
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
    info = {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(TorchTrainer, port, group_name="weight_update_group")
        client.init_weight_transfer_engine(address | {"world_size": 2, "backend": "gloo"})
        trainer = meeting.result()
        client.start_weight_update()
        sending = threads.submit(trainer.send, list(tensors.values()))
        client.update_weights(info)
        sending.result()
        client.finish_weight_update()
    client.close()


async def main(url: str, model: str, tensors: str, adapter: str) -> None:
    client = RemoteInferenceClient(
        url, [url], 1, model_name="policy", enable_return_sample_support_set=True
    )
    found: dict[str, Any] = {}

    async def rollout(name: str, model: str | None = None) -> None:
        inputs = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "cache_salt": name}
        output = await client.generate(inputs, model)
        found[name] = [output["response_ids"], output["response_logprobs"], output["responses"]]

    await rollout("before")
    new = load_file(tensors)
    await client.pause()
    await client.sleep_for_weight_sync()
    await client.wake_for_weight_sync(["weights"])
    await asyncio.to_thread(send_through_group, url, {name: -new[name] for name in new})
    await client.wake_for_weight_sync(["kv_cache"])
    await client.reset_prefix_cache()
    await client.resume()
    await rollout("sent")
    await asyncio.to_thread(follow_deltas, url, model, new, Path(tensors).parent)
    await rollout("updated")
    await client.sleep(level=1)
    assert await client.is_sleeping()
    await client.wake_up(["weights"])
    await client.wake_up(["kv_cache"])
    await rollout("awake")
    await client.load_lora_adapter("adapter", adapter)
    await rollout("adapted", "adapter")
    await client.unload_lora_adapter("adapter")
    await rollout("unloaded")
    cut = SAMPLING | {"top_k": 5}
    output = await client.generate(
        {"prompt_token_ids": PROMPTS, "sampling_params": cut, "return_sample_support": True}
    )
    rows = output["rollout_sample_support"]
    found["support"] = [each.tolist() for each in rows]
    found["cut"] = output["response_ids"]
    sample = {"prompt": {"chunks": [{"tokens": PROMPTS[0]}]}, "include_prompt_logprobs": True}
    answer = await client.sample({"json": sample | {"sampling_params": {"max_tokens": 3}}})
    found["sampled"] = [len(answer["sequences"][0]["tokens"]), len(answer["prompt_logprobs"])]
    ids = await client.tokenize(["one two"])
    found["text"] = await client.detokenize(ids)
    await client.teardown()
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
