"""The actor without Ray and without OpenRLHF: real engine, real group, an executor of our own."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch
from safetensors.torch import load_file

from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.trainers.openrlhf import stand_ins
from rollout.trainers.openrlhf.actor import RolloutActor
from rollout.trainers.openrlhf.options import ActorSettings, OwnOptions, model_folder
from rollout.trainers.openrlhf.sampling import VllmSamplingParams
from rollout.trainers.openrlhf.stand_ins import (
    BACKEND_VARIABLE,
    GROUP,
    TIMEOUT_VARIABLE,
    PyNcclCommunicator,
    StatelessProcessGroup,
)
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.held_engine import HeldEngine
from tests.helpers.ports import free_port

PARAMS = VllmSamplingParams(max_tokens=12, min_tokens=1, logprobs=1, skip_special_tokens=False)


class TwoCalls:
    """An executor that continues its prompt, and then asks once more for the same."""

    async def execute(self, prompt, sampling_params, llm_engine, **rest):
        outputs = [await llm_engine.generate([7, 8, 9], sampling_params) for _ in range(2)]
        return {"tokens": [output.outputs[0].token_ids for output in outputs], "outputs": outputs}


def settings_of(model, options, **given) -> ActorSettings:
    default = {
        "seed": 3, "resumed_from": "", "max_context_len": 64, "prefix_cache": True,
        "kv_fraction": 0.3, "dtype": "float32", "tensor_parallel_size": 1,
    }  # fmt: skip
    return ActorSettings(model=str(model), options=options, **default | given)


def make_actor(model, *, sync_timeout=HANG_SECONDS, **given) -> RolloutActor:
    options = OwnOptions(
        spec_options={"calibration_seconds": 0},
        overrides={"kv_bytes": 2_000_000, "device": "cpu"},
        sync_timeout=sync_timeout,
    )
    return RolloutActor(settings_of(model, options, **given), TwoCalls)


@pytest.fixture
def actor(model):
    actor = make_actor(model)
    yield actor
    actor.close()


def responses(actor, prompt="say one", num_samples=3):
    return actor.generate_responses(prompt, None, PARAMS, 64, None, num_samples)


class Trainer:
    """The sending side of the group, as OpenRLHF's rank 0 is."""

    def __init__(self, actor, group):
        self.actor, self.group = actor, group

    @classmethod
    async def of(cls, actor, monkeypatch, *, size=1, has_vllm=False):
        """``size``: ranks of the actor's engine. ``has_vllm``: it receives as where vllm is
        installed."""
        monkeypatch.setenv(BACKEND_VARIABLE, "gloo")
        monkeypatch.setenv(TIMEOUT_VARIABLE, str(HANG_SECONDS))
        address = ("127.0.0.1", free_port())

        def communicator(rank):
            place = StatelessProcessGroup.create(*address, rank, size + 1)
            return asyncio.to_thread(PyNcclCommunicator, place, "cpu")

        if has_vllm:
            group, receiver = await asyncio.gather(communicator(0), communicator(1))
            actor._weights.receive_from(receiver)
        else:
            joining = actor.init_process_group(*address, 1, size + 1, GROUP, "gloo", False)
            group, _ = await asyncio.gather(communicator(0), joining)
        return cls(actor, group)

    async def send(self, name, tensor, *, last=False):
        call = self.actor.update_weight(name, tensor.dtype, tensor.shape, empty_cache=last)
        sent = asyncio.to_thread(self.group.broadcast, tensor, 0)
        await asyncio.gather(call, sent)

    async def send_all(self, tensors):
        for index, (name, tensor) in enumerate(tensors.items()):
            await self.send(name, tensor, last=index == len(tensors) - 1)


@pytest.fixture
def weights(model):
    return {name: tensor * 0.9 for name, tensor in load_file(model / "model.safetensors").items()}


def test_seeds_are_those_of_the_sample_and_of_nothing_else(model):
    def tokens(order):
        actor = make_actor(model)

        async def run():
            answers = await asyncio.gather(*(responses(actor, prompt) for prompt in order))
            return {
                prompt: [each["tokens"] for each in samples]
                for prompt, samples in zip(order, answers, strict=True)
            }

        result = asyncio.run(run())
        actor.close()
        return result

    first, second = tokens(["a", "b"]), tokens(["b", "a"])
    assert first == second  # whatever came first
    every = [tuple(call) for samples in first.values() for sample in samples for call in sample]
    assert len(set(every)) == len(every) == 12


def test_a_prompt_that_comes_again_is_sampled_anew(actor):
    async def run():
        return [[each["tokens"] for each in await responses(actor)] for _ in range(2)]

    once, again = asyncio.run(run())
    assert once != again


def test_a_resumed_run_does_not_repeat_what_it_sampled_before(model):
    def tokens(resumed_from):
        actor = make_actor(model, resumed_from=resumed_from)
        samples = asyncio.run(responses(actor))
        actor.close()
        return [sample["tokens"] for sample in samples]

    fresh, resumed, later = tokens(""), tokens("global_step4"), tokens("global_step8")
    assert fresh != resumed != later != fresh
    assert resumed == tokens("global_step4")


def test_outputs_are_what_executors_read(actor):
    (response,) = asyncio.run(responses(actor, num_samples=1))
    output = response["outputs"][0].outputs[0]
    assert isinstance(output.token_ids, list)
    assert output.finish_reason in ("stop", "length")
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        assert logprobs[token].logprob <= 0
    assert response["extra_logs"]["specrollout/accept_length"] >= 1
    assert response["extra_logs"]["specrollout/weight_version_max"] == 0


def test_what_is_ours_goes_over_openrlhfs_arguments(model):
    def memory(**overrides):
        options = OwnOptions(spec="none", overrides={"max_kv_tokens": 256} | overrides)
        return settings_of(model, options).make_engine().config.memory

    assert memory().kv_fraction == 0.3
    assert memory(kv_fraction=0.2).kv_fraction == 0.2


def test_images_are_refused(actor):
    with pytest.raises(InvalidInputError, match="images"):
        asyncio.run(actor.generate_responses("a", None, PARAMS, 64, None, 1, images=["x.png"]))
    with pytest.raises(InvalidInputError, match="multi_modal_data"):
        asyncio.run(actor.generate([1], PARAMS, {"image": [1]}))


@pytest.mark.parametrize("has_vllm", [False, True])
def test_an_update_is_one_version(actor, monkeypatch, weights, has_vllm):
    async def run():
        trainer = await Trainer.of(actor, monkeypatch, has_vllm=has_vllm)
        names = list(weights)
        for name in names[:-1]:
            await trainer.send(name, weights[name])
        waiting = asyncio.ensure_future(responses(actor))
        await asyncio.sleep(0.2)
        assert not waiting.done()  # nothing is sampled from half an update
        await trainer.send(names[-1], weights[names[-1]], last=True)
        first = await waiting
        await trainer.send_all(weights)
        return first, await responses(actor)

    for version, samples in enumerate(asyncio.run(run()), start=1):
        for sample in samples:
            assert sample["extra_logs"]["specrollout/weight_version_min"] == version
            assert sample["extra_logs"]["specrollout/weight_version_max"] == version


def test_a_trainer_that_dies_leaves_an_engine_that_refuses(model, monkeypatch, weights):
    actor = make_actor(model, sync_timeout=3.0)
    names = list(weights)

    async def run():
        trainer = await Trainer.of(actor, monkeypatch)
        await trainer.send(names[0], weights[names[0]])
        waiting = asyncio.ensure_future(responses(actor))
        with pytest.raises(WeightUpdateError, match="came for 3 seconds"):
            await asyncio.wait_for(waiting, HANG_SECONDS)
        with pytest.raises(WeightUpdateError, match="torn"):
            await responses(actor)
        await trainer.send_all(weights)  # a full update heals
        return await responses(actor)

    assert len(asyncio.run(run())) == 3
    actor.close()


def test_a_parameter_without_a_place_fails_the_update(actor, monkeypatch, weights):
    async def run():
        trainer = await Trainer.of(actor, monkeypatch)
        with pytest.raises(InvalidInputError, match=r"model\.unknown"):
            await trainer.send("model.unknown", torch.ones(3))
        return await responses(actor)  # nothing had been written: the old weights serve

    assert asyncio.run(run())[0]["extra_logs"]["specrollout/weight_version_max"] == 0


def test_a_pause_keeps_requests_and_an_update_splits_them(actor, monkeypatch, weights):
    long = VllmSamplingParams(max_tokens=40, min_tokens=40, logprobs=1, ignore_eos=True)

    held = HeldEngine(3)  # by then 35 of 40 tokens at most

    async def run():
        trainer = await Trainer.of(actor, monkeypatch)
        await actor._engine.call(held.hold)
        running = asyncio.ensure_future(
            actor.generate_responses("say one", None, long, 64, None, 2)
        )
        assert await asyncio.to_thread(held.waits.wait, HANG_SECONDS)
        pausing = asyncio.ensure_future(actor.pause_generation())
        await asyncio.sleep(0)  # it is asked for, and comes before the next step
        held.go_on.set()
        await pausing
        await trainer.send_all(weights)
        assert actor.get_num_unfinished_requests() == 2
        await actor.resume_generation()
        return await running

    logs = [sample["extra_logs"] for sample in asyncio.run(run())]
    assert all(log["specrollout/weight_version_max"] == 1 for log in logs)


def test_two_ranks_are_one_engine(model, monkeypatch, weights):
    """Each rank receives the trainer's parameters by itself."""

    def outcome(size):
        actor = make_actor(model, tensor_parallel_size=size)

        async def run():
            before = await responses(actor)
            trainer = await Trainer.of(actor, monkeypatch, size=size)
            await actor.sleep()
            await actor.wake_up(["weights"])
            await trainer.send_all(weights)
            await actor.wake_up()
            after = await responses(actor)
            digest = await actor._engine.call(lambda engine: engine.weights_digest())
            return [sample["tokens"] for sample in (*before, *after)], digest

        found = asyncio.run(run())
        actor.close()
        return found

    assert outcome(2) == outcome(1)


def test_sleep_and_wake_as_the_trainer_calls_them(actor, monkeypatch, weights):
    async def run():
        trainer = await Trainer.of(actor, monkeypatch)
        await actor.sleep()
        await actor.wake_up()
        before = await responses(actor)
        await actor.sleep()
        await actor.wake_up(["weights"])
        await actor.reset_prefix_cache()
        await trainer.send_all(weights)
        await actor.wake_up()
        return before, await responses(actor)

    before, after = asyncio.run(run())
    assert before[0]["extra_logs"]["specrollout/weight_version_max"] == 0
    assert after[0]["extra_logs"]["specrollout/weight_version_max"] == 1


def test_requests_that_cannot_run_fail_alone(actor):
    async def run():
        return await asyncio.gather(
            actor.generate([5] * 64, PARAMS), actor.generate([5] * 4, PARAMS),
            return_exceptions=True,
        )  # fmt: skip

    wrong, right = asyncio.run(run())
    assert isinstance(wrong, RolloutError)
    assert right.outputs[0].token_ids


def test_a_model_of_the_hub_is_its_cached_folder(tmp_path, monkeypatch):
    cached = tmp_path / "models--some--model"
    folder = cached / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_folder("some/model") == str(folder)
    assert model_folder(str(tmp_path)) == str(tmp_path)


@pytest.fixture
def _clean_modules():
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        if name.partition(".")[0] in ("vllm", "flash_attn"):
            del sys.modules[name]


@pytest.mark.skipif(stand_ins.is_installed("vllm"), reason="vllm is installed")
@pytest.mark.usefixtures("_clean_modules")
def test_stand_ins_import_and_say_what_is_missing():
    stand_ins.install()
    import vllm
    from flash_attn.bert_padding import unpad_input
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator as Communicator

    assert Communicator is PyNcclCommunicator
    assert vllm.SamplingParams is VllmSamplingParams
    assert not stand_ins.is_installed("vllm")
    with pytest.raises(stand_ins.MissingPackageError, match="flash_attn is not installed"):
        unpad_input(torch.ones(1))
    with pytest.raises(ImportError):
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss  # noqa: F401
    with pytest.raises(ImportError):
        from vllm import LLM  # noqa: F401
