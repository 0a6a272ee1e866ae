"""The actor without Ray and without OpenRLHF: real engine, real group, an executor of our own."""

from __future__ import annotations

import asyncio

import pytest
import torch
from safetensors.torch import load_file

from rollout.errors import InvalidInputError, RolloutError, WeightUpdateError
from rollout.trainers.openrlhf.actor import RolloutActor
from rollout.trainers.openrlhf.options import ActorSettings, OwnOptions
from rollout.trainers.openrlhf.sampling import VllmSamplingParams
from rollout.trainers.openrlhf.stand_ins import (
    BACKEND_VARIABLE,
    GROUP,
    TIMEOUT_VARIABLE,
    PyNcclCommunicator,
    StatelessProcessGroup,
)
from tests.helpers.hang import HANG_SECONDS
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
    async def of(cls, actor, monkeypatch):
        monkeypatch.setenv(BACKEND_VARIABLE, "gloo")
        monkeypatch.setenv(TIMEOUT_VARIABLE, str(HANG_SECONDS))
        address = ("127.0.0.1", free_port())

        place = StatelessProcessGroup.create(*address, 0, 2)
        group, _ = await asyncio.gather(
            asyncio.to_thread(PyNcclCommunicator, place, "cpu"),
            actor.init_process_group(*address, 1, 2, GROUP, "gloo", False),
        )
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
    def tokens(order, resumed_from=""):
        actor = make_actor(model, resumed_from=resumed_from)

        async def run():
            return await asyncio.gather(*(responses(actor, prompt) for prompt in order))

        answers = asyncio.run(run())
        actor.close()
        return [
            [tuple(each["tokens"][call]) for each in some for call in (0, 1)] for some in answers
        ]

    first, second, again = tokens("aba")
    assert tokens("ba") == [second, first], "whatever came first"
    assert len({*first, *second, *again}) == 18, "a prompt that comes again is sampled anew"
    resumed = tokens("a", "global_step4")
    assert resumed == tokens("a", "global_step4")
    assert resumed != tokens("a", "global_step8") != [first] != resumed


def test_requests_that_cannot_run_fail_alone(actor):
    async def run():
        return await asyncio.gather(
            actor.generate([5] * 4, PARAMS),
            actor.generate([5] * 64, PARAMS),
            actor.generate([1], PARAMS, {"image": [1]}),
            actor.generate_responses("a", None, PARAMS, 64, None, 1, images=["x.png"]),
            return_exceptions=True,
        )

    right, too_long, *pictured = asyncio.run(run())
    output = right.outputs[0]
    assert isinstance(output.token_ids, list)
    assert output.finish_reason in ("stop", "length")
    for token, logprobs in zip(output.token_ids, output.logprobs, strict=True):
        assert logprobs[token].logprob <= 0
    assert isinstance(too_long, RolloutError)
    for error, field in zip(pictured, ("multi_modal_data", "images"), strict=True):
        assert isinstance(error, InvalidInputError)
        assert error.field == field


def test_an_update_is_one_version(actor, monkeypatch, weights):
    async def run():
        trainer = await Trainer.of(actor, monkeypatch)
        names = list(weights)
        for name in names[:-1]:
            await trainer.send(name, weights[name])
        waiting = asyncio.ensure_future(responses(actor))
        await asyncio.sleep(0.2)
        assert not waiting.done()  # nothing is sampled from half an update
        await trainer.send(names[-1], weights[names[-1]], last=True)
        first = await waiting
        assert all(sample["extra_logs"]["specrollout/accept_length"] >= 1 for sample in first)
        await actor.pause_generation()
        await trainer.send_all(weights)
        waiting = asyncio.ensure_future(responses(actor))
        while actor.get_num_unfinished_requests() < 3:
            await asyncio.sleep(0.01)
        await actor.resume_generation()
        return first, await waiting

    for version, samples in enumerate(asyncio.run(run()), start=1):
        for sample in samples:
            assert sample["extra_logs"]["specrollout/weight_version_min"] == version
            assert sample["extra_logs"]["specrollout/weight_version_max"] == version


def test_a_trainer_that_dies_leaves_an_engine_that_refuses(model, monkeypatch, weights):
    actor = make_actor(model, sync_timeout=1.5)
    names = list(weights)

    async def run():
        trainer = await Trainer.of(actor, monkeypatch)
        await trainer.send(names[0], weights[names[0]])
        waiting = asyncio.ensure_future(responses(actor))
        with pytest.raises(WeightUpdateError, match=r"came for 1\.5 seconds"):
            await asyncio.wait_for(waiting, HANG_SECONDS)
        with pytest.raises(WeightUpdateError, match="torn"):
            await responses(actor)
        await trainer.send_all(weights)  # a full update heals
        return await responses(actor)

    assert len(asyncio.run(run())) == 3
    actor.close()


def test_sleep_and_wake_as_the_trainer_calls_them(actor, monkeypatch, weights):
    async def run():
        trainer = await Trainer.of(actor, monkeypatch)
        await actor.sleep()
        await actor.wake_up()
        with pytest.raises(InvalidInputError, match=r"model\.unknown"):
            await trainer.send("model.unknown", torch.ones(3))
        before = await responses(actor)  # nothing had been written: the old weights serve
        await actor.sleep()
        await actor.wake_up(["weights"])
        await actor.reset_prefix_cache()
        await trainer.send_all(weights)
        await actor.wake_up()
        return before, await responses(actor)

    before, after = asyncio.run(run())
    assert before[0]["extra_logs"]["specrollout/weight_version_max"] == 0
    assert after[0]["extra_logs"]["specrollout/weight_version_max"] == 1
