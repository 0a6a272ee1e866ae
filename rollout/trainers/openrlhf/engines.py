"""Ray actors in place of OpenRLHF's vLLM engines."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollout.errors import InvalidInputError
from rollout.trainers.openrlhf.actor import RolloutActor
from rollout.trainers.openrlhf.arguments import SIZE, TrainerArguments
from rollout.trainers.openrlhf.options import ActorSettings, OwnOptions
from rollout.trainers.openrlhf.sample import load_executor

_CALLS_AT_ONCE = 100_000
"""The most calls an actor runs at once. Each prompt occupies one until it is done, and an update
must not wait behind them."""

_SHARED_GPU = 0.2
"""The share of a GPU that OpenRLHF reserves for each actor where several share it."""


class RolloutActorProcess(RolloutActor):
    """A `RolloutActor` in a process of Ray's, whose ranks have the GPUs that Ray gave them."""

    def __init__(
        self,
        settings: ActorSettings,
        make_executor: Callable[[], Any],
        gpus: Sequence[str] = (),
    ) -> None:
        """``gpus``: of all ranks, where they are not those that Ray has given the actor alone."""
        from openrlhf.trainer.ray.utils import ray_noset_visible_devices

        given = [str(gpu) for gpu in ray.get_gpu_ids()]
        if gpus or (given and ray_noset_visible_devices()):
            # Ray leaves every GPU of the node visible then, and all engines would take the first.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus or given)
        super().__init__(settings, make_executor)


def create_engines(
    options: OwnOptions,
    trainer: TrainerArguments,
    num_engines: int,
    tensor_parallel_size: int,
    pretrain: str,
    seed: int,
    full_determinism: bool,
    enable_prefix_caching: bool,
    enforce_eager: bool,
    max_model_len: int,
    shared_pg: Any = None,
    gpu_memory_utilization: float = 0.95,
    vllm_enable_sleep: bool = False,
    logprobs_mode: str | None = None,
    agent_func_path: str | None = None,
    remote_rm_url: Sequence[str] | None = None,
    max_images_per_prompt: int = 0,
) -> list[Any]:
    """`openrlhf.trainer.ray.create_vllm_engines` after the first two arguments: Ray actor handles.

    `read_arguments` has refused what cannot be honoured. What has no meaning here:
    ``full_determinism`` (always), ``enforce_eager`` (there are no graphs), ``logprobs_mode``
    (always those the trainer recomputes).
    """
    on_gpu = options.device != "cpu"
    is_shared = shared_pg is not None
    num_cpus = _SHARED_GPU if is_shared else float(tensor_parallel_size)
    num_gpus = num_cpus if on_gpu else 0.0
    if not is_shared:
        bundle = {"CPU": num_cpus, "GPU": num_gpus} if on_gpu else {"CPU": num_cpus}
        shared_pg = placement_group([dict(bundle) for _ in range(num_engines)], strategy="PACK")
        ray.get(shared_pg.ready())
    actor = ray.remote(RolloutActorProcess)
    engines = []
    for index in range(num_engines):
        first, gpus = index, tuple[str, ...]()
        if is_shared and tensor_parallel_size > 1:
            first, gpus = _shared_gpus(shared_pg, index, tensor_parallel_size, num_gpus)
        settings = ActorSettings(
            model=pretrain,
            seed=seed + index,
            resumed_from=trainer.resumed_from,
            max_context_len=max_model_len,
            prefix_cache=enable_prefix_caching,
            kv_fraction=gpu_memory_utilization,
            dtype=trainer.dtype,
            tensor_parallel_size=tensor_parallel_size,
            options=options,
        )
        placement = PlacementGroupSchedulingStrategy(
            placement_group=shared_pg,
            placement_group_capture_child_tasks=True,
            placement_group_bundle_index=first,
        )
        resources = actor.options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            scheduling_strategy=placement,
            max_concurrency=_CALLS_AT_ONCE,
        )
        engines.append(
            resources.remote(settings, partial(load_executor, agent_func_path, remote_rm_url), gpus)
        )
    if vllm_enable_sleep:
        ray.get([engine.sleep.remote() for engine in engines])
    return engines


def _shared_gpus(
    shared_pg: Any, index: int, size: int, num_gpus: float
) -> tuple[int, tuple[str, ...]]:
    """The first bundle of the actors whose GPUs engine ``index`` shares, and the GPUs of all of
    them. The bundles are those that OpenRLHF gives vLLM's ranks.

    Raises InvalidInputError where they are on several nodes.
    """
    from openrlhf.trainer.ray.utils import get_bundle_indices

    bundles = get_bundle_indices(shared_pg, index, size)
    place = ray.remote(_place)
    places = ray.get([
        place.options(
            num_cpus=num_gpus,
            num_gpus=num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=shared_pg, placement_group_bundle_index=bundle
            ),
        ).remote()
        for bundle in bundles
    ])  # fmt: skip
    if len({node for node, _ in places}) > 1:
        raise InvalidInputError(f"--{SIZE}", size, "must divide the GPUs of each node")
    return bundles[0], tuple(gpu for _, gpus in places for gpu in gpus)


def _place() -> tuple[str, list[str]]:
    """Node and GPUs of the process this runs in."""
    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]
