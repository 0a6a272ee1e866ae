"""Servers and adapters as verl's trainer would use them, in Ray, without the trainer."""

from __future__ import annotations

import asyncio
import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
import torch
import verl  # noqa: F401  before its parts: it loads the platform
from hold import hold
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutReplicaRegistry

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.trainers.verl.adapter import SEGMENTS, ServerAdapter, send_weights
from rollout.trainers.verl.options import NAME, REFUSED, server_name
from rollout.trainers.verl.sampling import RequestSeeds
from rollout.trainers.verl.server import Server
from rollout.weights.shared_memory import (
    SharedMemoryHandle,
    SharedMemoryReceiver,
    SharedMemorySender,
)

pytestmark = [pytest.mark.timeout(6600), pytest.mark.usefixtures("own_ray")]
RESPONSE = 300
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}


def rollout_config(**changes):
    # Drafts whatever they cost, for a tiny model decodes too fast for any to pay.
    spec_options = {"budget": "fixed", "calibration_seconds": 0}
    own = {"kv_bytes": 1 << 24, "num_threads": 1, "spec_options": spec_options}
    settings = {
        "name": NAME,
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "load_format": "auto",
        "prompt_length": 64,
        "response_length": RESPONSE,
        "ignore_eos": True,
        "engine_kwargs": {NAME: own},
        "checkpoint_engine": CheckpointEngineConfig(update_weights_bucket_megabytes=1),
    }
    return RolloutConfig(**(settings | changes))


@pytest.fixture(scope="module")
def model_config(checkpoint):
    return HFModelConfig(path=str(checkpoint), override_config={"attn_implementation": "sdpa"})


def start(model_config, seeds, rank, *, standalone=False, **changes):
    server = ray.remote(Server).options(name=server_name(rank), max_concurrency=100)
    started = server.remote(
        rollout_config(**changes),
        model_config,
        replica_rank=rank,
        standalone=standalone,
        seeds=seeds,
    )
    ray.get(started.launch.remote())
    return started


@pytest.fixture(scope="module")
def seeds(own_ray):
    return ray.remote(RequestSeeds).remote(42)


@pytest.fixture(scope="module")
def server(model_config, seeds):
    """Replica 0, of many tests: each leaves it serving the checkpoint's weights."""
    return start(model_config, seeds, 0)


@pytest.fixture
def launch(model_config, seeds):
    """Starts other servers, each of a rank of its own; they end with the test."""
    servers = []

    def make(rank, seeds=seeds, **changes):
        servers.append(start(model_config, seeds, rank, **changes))
        return servers[-1]

    yield make
    for server in servers:
        ray.kill(server)


def generate(server, prompt, **sampling):
    return server.generate.remote(
        prompt_ids=prompt, sampling_params=SAMPLING | sampling, request_id="any"
    )


def adapter_of(model_config, worker_rank, **options):
    with mock.patch.dict(os.environ, RANK=str(worker_rank)):
        config = rollout_config(**options.pop("changes", {}))
        return ServerAdapter(config, model_config, None, **options)


def update(model_config, weights, step=None, rank=0, **options):
    adapter = adapter_of(model_config, 0, replica_rank=rank)
    asyncio.run(adapter.update_weights(weights, global_steps=step, **options))


@pytest.fixture
def tensors(checkpoint):
    return list(load_file(checkpoint / "model.safetensors").items())


HONOURED = frozenset({
    "name", "prompt_length", "response_length", "seed", "dtype", "gpu_memory_utilization",
    "standalone_gpu_memory_utilization", "ignore_eos", "free_cache_engine", "enable_sleep_mode",
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "logprobs_mode",
    "enable_prefix_caching", "load_format", "engine_kwargs", "calculate_log_probs",
    "full_determinism", "checkpoint_engine", "enable_rollout_routing_replay",
    "tensor_model_parallel_size",
})  # fmt: skip
"""Fields of verl's RolloutConfig that reach the engine or its server."""

HARMLESS = frozenset({
    "mode", "nnodes", "n_gpus_per_node", "temperature", "top_k", "top_p", "do_sample", "n",
    "val_kwargs", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "agent", "trace", "multi_turn",
    "server", "custom", "checkpoint_manager_class", "enforce_eager", "enable_chunked_prefill",
    "multi_stage_wake_up", "disable_log_stats", "layered_summon", "layer_name_map",
    "sglang_engine_mode", "skip_tokenizer_init", "moe_load_balance_metrics_interval",
    "router_config_path",
})  # fmt: skip
"""Read by verl itself, by another engine alone, or of no effect on what is generated."""


def test_every_field_of_verls_configuration_is_sorted_once():
    names = {field.name for field in fields(RolloutConfig)} - {"_target_"}
    assert names == HONOURED | HARMLESS | REFUSED.keys()
    assert len(names) == len(HONOURED) + len(HARMLESS) + len(REFUSED)


def state(server, look):
    """``look(engine)``, between two steps."""
    call = server.__ray_call__.remote(lambda actor: actor._engine.loop.call(look).result())
    return ray.get(call)


def assert_waits(server, request):
    """The request has reached the engine, which cannot run."""
    while not state(server, lambda engine: engine.has_unfinished):
        assert not ray.wait([request], timeout=0)[0]
    assert not state(server, lambda engine: engine.can_run)


def test_a_cut_request_goes_on_bit_for_bit_on_another_server(server, launch):
    second = launch(1)
    ray.get(server.set_global_steps.remote(3))  # seeds go by the step
    hold(server)
    prompt = [50, 60, 5]
    running = generate(server, prompt)
    while not state(server, lambda engine: engine.is_paused):
        assert not ray.wait([running], timeout=0)[0]
    ray.get(server.abort_all_requests.remote())
    cut = ray.get(running)
    ray.get(server.resume_generation.remote())
    assert 0 < len(cut.token_ids) < RESPONSE
    assert cut.stop_reason == "aborted"
    left = RESPONSE - len(cut.token_ids)
    rest = ray.get(generate(second, [*prompt, *cut.token_ids], max_tokens=left))
    assert rest.stop_reason == "completed"

    again = ray.remote(RequestSeeds).remote(42)  # counts this prompt's samples from the first
    third = launch(2, seeds=again, standalone=True)
    ray.get(third.set_global_steps.remote(3))
    uncut = ray.get(generate(third, prompt))
    assert cut.token_ids + rest.token_ids == uncut.token_ids
    assert cut.log_probs + rest.log_probs == uncut.log_probs
    counters = [f"spec_num_{what}" for what in ("draft_tokens", "accepted_tokens", "verify_steps")]
    assert all(uncut.extra_fields[name] > 0 for name in counters)


def test_requests_wait_while_generation_is_stopped_or_are_sent_back(server):
    ray.get(server.abort_all_requests.remote())
    waiting = generate(server, [5, 6, 7], max_tokens=3)
    assert_waits(server, waiting)
    ray.get(server.resume_generation.remote())
    assert len(ray.get(waiting).token_ids) == 3
    ray.get(server.abort_all_requests.remote(reject_request=True))
    sent_back = ray.get(generate(server, [5, 6, 7]))
    assert (sent_back.token_ids, sent_back.stop_reason) == ([], "aborted")
    ray.get(server.resume_generation.remote())


def test_weights_are_those_of_the_trainers_step(launch, model_config, tensors):
    server = launch(3, load_format="dummy")
    with pytest.raises(WeightUpdateError, match="none have come yet"):
        ray.get(generate(server, [5, 6, 7], max_tokens=4))
    update(model_config, iter(tensors), step=7, rank=3)
    output = ray.get(generate(server, [5, 6, 7], max_tokens=4))
    assert output.extra_fields["global_steps"] == output.extra_fields["min_global_steps"] == 7
    changed = [(name, tensor * 1.5) for name, tensor in tensors]
    update(model_config, iter(changed), step=8, rank=3)
    after = ray.get(generate(server, [5, 6, 7], max_tokens=4))
    assert after.extra_fields["global_steps"] == 8
    assert after.log_probs != output.log_probs


def test_adapters_come_without_their_weights(checkpoint, seeds):
    """In verl's calls: the base once, under names of PEFT's layers, then what PEFT saves."""
    model_config = HFModelConfig(path=str(checkpoint), lora_rank=4)
    server = start(model_config, seeds, 9, load_format="dummy")
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(base, config)
    held = [(n, t) for n, t in model.base_model.model.state_dict().items() if "lora_" not in n]
    peft_config = config.to_dict()
    update(model_config, iter(held), 1, 9, peft_config=peft_config, base_sync_done=False)
    adapters = get_peft_model_state_dict(model).items()
    update(model_config, iter(adapters), 1, 9, peft_config=peft_config, base_sync_done=True)
    digest = state(server, lambda engine: engine.weights_digest())
    before = ray.get(generate(server, [9, 8], temperature=0, max_tokens=9))
    ray.get(server.sleep.remote())
    ray.get(server.wake_up.remote())
    update(model_config, iter(adapters), 2, 9, peft_config=peft_config, base_sync_done=True)
    after = ray.get(generate(server, [9, 8], temperature=0, max_tokens=9))
    assert after.log_probs == before.log_probs
    assert after.extra_fields["global_steps"] == 2
    merged = model.merge_and_unload().state_dict().items()
    update(model_config, iter(merged), 3, 9)
    assert state(server, lambda engine: engine.weights_digest()) == digest
    ray.kill(server)


def test_a_sender_that_fails_midway_leaves_a_server_that_says_so(server, model_config, tensors):
    ray.get(server.abort_all_requests.remote())
    waiting = generate(server, [5, 6, 7], max_tokens=4)

    def failing():
        yield from tensors[: len(tensors) - 2]
        raise ConnectionError("the trainer is gone")

    with pytest.raises(ConnectionError):
        update(model_config, failing(), step=1)
    ray.get(server.resume_generation.remote())
    for request in (waiting, generate(server, [5, 6, 7], max_tokens=4)):
        with pytest.raises(WeightUpdateError, match="the trainer is gone"):
            ray.get(request)
    update(model_config, iter(tensors), step=1)
    assert len(ray.get(generate(server, [5, 6, 7], max_tokens=4)).token_ids) == 4


def test_two_ranks_are_one_server(launch, model_config, tensors):
    """Each of two workers takes part in an update, and the first one brings it."""
    both = {"tensor_model_parallel_size": 2, "load_format": "dummy"}
    outputs = []
    for size, rank in ((1, 10), (2, 11)):
        changes = both | {"tensor_model_parallel_size": size}
        server = launch(rank, seeds=ray.remote(RequestSeeds).remote(42), **changes)
        ray.get(server.sleep.remote())
        workers = [
            adapter_of(model_config, rank * size + worker, changes=changes)
            for worker in range(size)
        ]
        taken = []

        def counted(taken=taken):
            for name, tensor in tensors:
                taken.append(name)
                yield name, tensor * 1.5

        async def synced(workers=workers, counted=counted):
            for worker in workers:
                await worker.resume(["weights"])
                await worker.update_weights(counted(), global_steps=3)
                await worker.resume(["kv_cache"])

        assert [worker.replica_rank for worker in workers] == [rank] * size
        asyncio.run(synced())
        assert len(taken) == size * len(tensors)
        found = ray.get([generate(server, [9, 8, token], max_tokens=40) for token in range(5, 9)])
        assert {output.extra_fields["global_steps"] for output in found} == {3}
        outputs.append([(output.token_ids, output.log_probs) for output in found])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(launch, model_config, tensors, level):
    own = rollout_config().engine_kwargs[NAME] | {"sleep_level": level}
    server = launch(4 + level, engine_kwargs={NAME: own})
    before = ray.get(generate(server, [9, 8], temperature=0, max_tokens=9))
    ray.get([server.sleep.remote(), server.sleep.remote()])
    waiting = generate(server, [9, 8], temperature=0, max_tokens=9)
    ray.get(server.wake_up.remote(tags=["weights"]))
    if level == 2:
        update(model_config, iter(tensors), step=1, rank=4 + level)
    assert_waits(server, waiting)
    ray.get(server.wake_up.remote(tags=["kv_cache"]))
    assert ray.get(waiting).log_probs == before.log_probs


def test_what_cannot_be_honoured_is_refused(server, model_config):
    replica = RolloutReplicaRegistry.get(NAME)
    with pytest.raises(InvalidInputError, match=r"tensor_model_parallel_size=4.*n_gpus_per_node=2"):
        replica(0, rollout_config(tensor_model_parallel_size=4), model_config, 2)
    with pytest.raises(InvalidInputError, match="reward model"):
        replica(0, rollout_config(), model_config, is_reward_model=True)
    with pytest.raises(InvalidInputError, match="image_data"):
        ray.get(
            server.generate.remote(
                prompt_ids=[5], sampling_params={}, request_id="any", image_data=[object()]
            )
        )


class Reference:
    """Like Ray's reference to a call: who stops awaiting it does not cancel the call."""

    def __init__(self, call):
        self._task = asyncio.ensure_future(call)

    def __await__(self):
        return asyncio.shield(self._task).__await__()


class LateReader:
    """Stands for a server's handle. It reads buckets one after the other, when asked to."""

    def __init__(self, fails_at=None):
        self.found, self.started, self.fails_at = {}, 0, fails_at
        self.turns = asyncio.Semaphore(0)
        self._one_at_a_time = asyncio.Lock()
        self._receiver = SharedMemoryReceiver()

    def __getattr__(self, method):
        return SimpleNamespace(remote=partial(self._start, method))

    def _start(self, method, *arguments):
        call = self._load(self.started, *arguments) if method == "load_weights" else self._nothing()
        self.started += method == "load_weights"
        return Reference(call)

    async def _nothing(self):
        pass

    async def _load(self, index, handle):
        async with self._one_at_a_time:
            await self.turns.acquire()
            if index == self.fails_at:
                raise WeightUpdateError("this bucket is refused")
            pairs = self._receiver.tensors(SharedMemoryHandle.from_json(handle), "handle")
            self.found.update((name, tensor.clone()) for name, tensor in pairs)


def numbered(count):
    return {f"weight {index}": torch.full((4096,), float(index)) for index in range(count)}


async def send(reader, weights, segments=SEGMENTS):
    """Send a bucket for each tensor; the reader takes one whenever the sender waits for it."""
    with SharedMemorySender(segments * 4 * 4096, num_segments=segments) as sender:
        sending = asyncio.ensure_future(
            send_weights(reader, weights.items(), sender, global_steps=1)
        )
        while not sending.done():
            for _ in range(20):  # the sender gets as far as it can
                await asyncio.sleep(0)
            assert reader.started - len(reader.found) <= segments
            reader.turns.release()
        await sending


@pytest.mark.parametrize("segments", [SEGMENTS, 1])
def test_a_buffer_is_filled_again_only_after_it_was_read(segments):
    async def run():
        reader, weights = LateReader(), numbered(3 * SEGMENTS + 1)
        await send(reader, weights, segments)
        assert reader.found.keys() == weights.keys()
        assert all(torch.equal(reader.found[name], weights[name]) for name in weights)

    asyncio.run(run())


def test_segments_are_kept_for_the_next_update(launch, model_config, tensors):
    launch(20)
    adapter = adapter_of(model_config, 0, replica_rank=20)
    held = []
    for step in (1, 2):
        asyncio.run(adapter.update_weights(tensors, global_steps=step))
        files = {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}
        held.append({file for file in files if file.startswith("/dev/shm/specrollout-")})
    assert held[0] == held[1] != set()


def test_after_a_bucket_that_fails_no_other_is_sent():
    async def run():
        reader, taken = LateReader(fails_at=2), []
        weights = numbered(4 * SEGMENTS)

        def watched():
            for pair in weights.items():
                taken.append(pair)
                yield pair

        with pytest.raises(WeightUpdateError, match="is refused"):
            await send(reader, SimpleNamespace(items=watched))
        assert reader.started == 2 + SEGMENTS
        assert len(taken) == len(weights), "taking them may be a collective"

    asyncio.run(run())
