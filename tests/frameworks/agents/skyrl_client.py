"""SkyRL's remote client, unmodified: rollouts, updates through a group and by adapters, sleep.

Run in an environment that has its package: ``python skyrl_client.py URL TENSORS ADAPTER``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers.ports import free_port
from tests.helpers.torch_trainer import TorchTrainer

# The package's parent imports its training service, which this client does not need.
_backends = ModuleType("skyrl.backends")
_skyrl = importlib.util.find_spec("skyrl")
assert _skyrl is not None
assert _skyrl.submodule_search_locations is not None
_backends.__path__ = [str(Path(_skyrl.submodule_search_locations[0]) / "backends")]
sys.modules["skyrl.backends"] = _backends

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)

PROMPTS = [[5, 9, 11], [7, 8]]
SAMPLING = {"max_tokens": 9, "temperature": 0.9, "logprobs": 0, "seed": 4, "min_tokens": 9}


@dataclass
class InitInfo:
    """SkyRL's own, over gloo: its NCCL needs GPUs."""

    port: int

    def for_servers(self, world_size: int, num_servers: int, dp_size: int) -> list[InitInfo]:
        return [self]

    def to_api_payload(self) -> dict[str, Any]:
        return {
            "master_address": "127.0.0.1", "master_port": self.port, "rank_offset": 1,
            "world_size": 2, "backend": "gloo",
        }  # fmt: skip


def update_info(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }


async def main(url: str, tensors: str, adapter: str) -> None:
    client = RemoteInferenceClient(url, [url], 1, model_name="policy")
    found: dict[str, Any] = {}

    async def rollout(name: str, model: str | None = None) -> None:
        inputs = {"prompt_token_ids": PROMPTS, "sampling_params": SAMPLING, "cache_salt": name}
        output = await client.generate(inputs, model)
        found[name] = [output["response_ids"], output["response_logprobs"], output["responses"]]

    await rollout("before")
    new = load_file(tensors)
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        loop = asyncio.get_running_loop()
        meeting = loop.run_in_executor(
            threads, lambda: TorchTrainer(port, group_name="weight_update_group")
        )
        await client.init_weight_update_communicator(InitInfo(port))
        trainer = await meeting
        await client.pause()
        await client.start_weight_update()
        sending = loop.run_in_executor(threads, trainer.send, new.values())
        await client.update_weights_nccl(update_info(new))
        await sending
        await client.finish_weight_update()
        await client.reset_prefix_cache()
        await client.resume()
    await rollout("updated")
    await client.sleep(level=1)
    await client.wake_up(["weights"])
    await client.wake_up(["kv_cache"])
    await rollout("awake")
    await client.load_lora_adapter("adapter", adapter)
    await rollout("adapted", "adapter")
    await client.unload_lora_adapter("adapter")
    await rollout("unloaded")
    sample = {"prompt": {"chunks": [{"tokens": PROMPTS[0]}]}, "include_prompt_logprobs": True}
    answer = await client.sample({"json": sample | {"sampling_params": {"max_tokens": 3}}})
    found["sampled"] = [len(answer["sequences"][0]["tokens"]), len(answer["prompt_logprobs"])]
    ids = await client.tokenize(["one two"])
    found["text"] = await client.detokenize(ids)
    await client.teardown()
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
