"""Requests from asyncio to the engine and their tokens back, without HTTP."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.config import ModelConfig
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.server.config import ServeConfig, ServerConfig
from rollout.server.errors import DrainingError
from rollout.server.load_log import log_load
from rollout.server.serving import Serving
from rollout.server.status import KnownStatus
from rollout.server.streams import SampleRequest
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.held_engine import held

SHORT = SamplingParams(temperature=0.9, max_new_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=0.9, max_new_tokens=400, ignore_eos=True)
Scenario = Callable[[Serving], Awaitable[None]]


@pytest.fixture
def run(text_model_path):
    """``run(scenario, engine_option=..., ...)`` beside a `Serving` that must be idle afterwards."""

    def run(scenario: Scenario, server: dict | None = None, **options) -> RolloutEngine:
        engine = RolloutEngine.from_pretrained(text_model_path, **options)
        model = ModelConfig(path=str(text_model_path))
        serving = Serving(engine, ServeConfig(model=model, server=ServerConfig(**server or {})))

        async def timed() -> None:
            async with asyncio.timeout(HANG_SECONDS):
                await scenario(serving)

        try:
            asyncio.run(timed())
        finally:
            serving.close()
        engine.check_integrity()
        assert engine.worker.memory.usage.used == 0
        return engine

    return run


def samples(params: SamplingParams, count: int = 2) -> list[SampleRequest]:
    return [
        SampleRequest(prompt_ids=[5, 6, 7], params=params, sample_index=i) for i in range(count)
    ]


async def pause(serving: Serving) -> None:
    await serving.call(lambda engine: engine.pause_generation("in_place"))


def test_a_reader_that_comes_late_gets_one_delta(run):
    async def scenario(serving):
        async with serving.stream(samples(SHORT, 1)) as deltas:
            while serving.num_unfinished:
                await asyncio.sleep(0.005)
            await deltas.ready()
            (delta,) = [delta async for delta in deltas]
            assert delta.tokens.token_ids == delta.rollout.token_ids
            assert len(delta.tokens.logprobs) == 40

    run(scenario)


def test_drain_finishes_what_runs_and_aborts_what_is_left(run):
    async def finishes(serving):
        call = asyncio.create_task(serving.generate(samples(SHORT)))
        await asyncio.sleep(0)
        await serving.drain()
        assert {r.finish_reason for r in await call} == {FinishReason.LENGTH}
        with pytest.raises(DrainingError):
            serving.stream(samples(SHORT))
        with pytest.raises(DrainingError):
            await serving.score([5], [6], SHORT)

    async def aborts(serving, *, hurried: bool):
        await pause(serving)
        call = asyncio.create_task(serving.generate(samples(SHORT)))
        await asyncio.sleep(0)
        drained = asyncio.create_task(serving.drain())
        await asyncio.sleep(0)
        if hurried:
            serving.end_drain()
        await drained
        assert {r.finish_reason for r in await call} == {FinishReason.ABORT}

    run(finishes)
    run(partial(aborts, hurried=False), {"drain_seconds": 0.1})
    run(partial(aborts, hurried=True), {"drain_seconds": 10 * HANG_SECONDS})


def test_scores_wait_for_room_and_fail_alone_where_there_is_never_any(run):
    async def scenario(serving):
        ids = [5 + i % 50 for i in range(60)]
        async with serving.stream(samples(LONG, 1)) as deltas:
            count = 0
            while count < 145:  # with its prompt it leaves less than 60 of 200 slots
                count += len((await anext(deltas)).tokens.token_ids)
            logprobs, _ = await serving.score(ids[:1], ids[1:], SamplingParams())
        assert len(logprobs) == 59
        with pytest.raises(OutOfMemoryError):
            await serving.score(ids, ids * 3, SamplingParams())

    run(scenario, max_kv_tokens=200, spec="none")


def test_a_refused_sample_ends_its_call(run):
    async def scenario(serving):
        wrong = SampleRequest(prompt_ids=[5], params=LONG, request_seed=2**64)
        with pytest.raises(InvalidInputError, match="request_seed"):
            await serving.generate([*samples(LONG), wrong])
        async with serving.stream([*samples(LONG), wrong]) as deltas:
            with pytest.raises(InvalidInputError, match="request_seed"):
                await deltas.ready()
        while serving.num_unfinished:
            await asyncio.sleep(0.005)

    run(scenario)


def test_a_configured_seed_makes_the_same_fresh_seeds(run):
    seeds = []

    async def scenario(serving):
        seeds.append([serving.fresh_seed() for _ in range(100)])

    for seed in (7, 7, None):
        run(scenario, {"seed": seed}, spec="none")
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 200


def test_the_load_is_logged_while_there_is_work(run, caplog):
    caplog.set_level(logging.INFO, log_load.__module__)

    async def scenario(serving: Serving) -> None:
        rounds, latest = 0, serving.status_cache.latest

        async def counted() -> KnownStatus:
            nonlocal rounds
            rounds += 1
            return await latest()

        serving.status_cache.latest = counted
        load_log = asyncio.create_task(log_load(serving, seconds=0.01))

        async def until(condition: Callable[[], object]) -> None:
            while not condition():
                await asyncio.sleep(0.01)

        await until(lambda: rounds > 3)
        assert not caplog.messages
        with held(serving.loop):
            sample = asyncio.create_task(serving.generate(samples(LONG, 1)))
            await until(lambda: any(each.startswith("1 running") for each in caplog.messages))
        await sample
        await pause(serving)
        sample = asyncio.create_task(serving.generate(samples(SHORT, 1)))
        await until(lambda: "nothing runs: generation is paused" in caplog.messages[-1])
        await serving.call(lambda engine: engine.continue_generation())
        await sample
        load_log.cancel()
        line = (
            r"[01] running, [01] waiting, [\d.]+ tokens/s, accept length ([\d.]+|-), KV [\d.]+ % "
        )
        line += r"in use, weight version 0(, nothing runs: .*)?"
        assert all(re.fullmatch(line, each) for each in caplog.messages)

    run(scenario)
