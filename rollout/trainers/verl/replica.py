"""One replica: a server beside the workers whose devices it shares or owns."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollout.errors import InvalidInputError
from rollout.trainers.verl.options import NAME, SIZE, server_name
from rollout.trainers.verl.sampling import RequestSeeds
from rollout.trainers.verl.server import Server, options_of


class SpecrolloutReplica(RolloutReplica):  # type: ignore[misc]  # verl is untyped here
    """Raises InvalidInputError when made, for whatever could not be honoured later."""

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        for role, asked in {"reward": is_reward_model, "teacher": is_teacher_model}.items():
            if asked:
                remedy = f"a {role} model is asked over HTTP, which is not offered: take vllm"
                raise InvalidInputError("rollout.name", NAME, remedy)
        options = options_of(config, model_config, standalone=False)
        size = options.engine_config().parallel.size
        if size > gpus_per_node:
            remedy = f"must be at most n_gpus_per_node={gpus_per_node}: a replica is on one node"
            raise InvalidInputError(SIZE, size, remedy)
        super().__init__(replica_rank, config, model_config, gpus_per_node, name_suffix=name_suffix)

    async def launch_servers(self) -> None:
        """One server, on the node and the devices of the replica's workers."""
        if self.rollout_mode is RolloutMode.STANDALONE:
            gpus = self.config.nnodes * self.config.n_gpus_per_node
            if gpus % len(self.workers):
                remedy = f"must divide the {gpus} GPUs of the rollout: some would be idle"
                raise InvalidInputError(SIZE, len(self.workers), remedy)
        places = await asyncio.gather(
            *(worker.__ray_call__.remote(_place_of) for worker in self.workers)
        )
        node_id, _ = places[0]
        if any(node != node_id for node, _ in places):
            remedy = "the workers of a replica are on several nodes: it must divide n_gpus_per_node"
            raise InvalidInputError(SIZE, len(places), remedy)
        devices = ",".join(devices for _, devices in places)
        seeds = ray.remote(RequestSeeds).options(
            name=f"{NAME}_request_seeds", get_if_exists=True, num_cpus=0
        )
        unset = dict.fromkeys(get_platform().ray_noset_envvars(), "1")
        name = server_name(self.replica_rank, self.name_suffix)
        server = (
            ray.remote(Server)
            .options(
                name=name,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                runtime_env={"env_vars": unset | {get_visible_devices_keyword(): devices}},
                max_concurrency=self.max_concurrency,
            )
            .remote(
                self.config,
                self.model_config,
                replica_rank=self.replica_rank,
                standalone=self.rollout_mode is RolloutMode.STANDALONE,
                seeds=seeds.remote(self.config.seed),
            )
        )
        await server.launch.remote()
        self.servers = [server]
        self._server_handle = server
        self._server_address = name  # a key for verl's load balancer; nothing listens on a port


def _place_of(worker: Any) -> tuple[str, str]:
    """Node and visible devices of the process this runs in."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), ",".join(devices)
