"""What HTTP costs: the same requests offline, in one call, and by clients of their own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from table import Row, row
from workloads import OPEN_PROMPTS, chat

from rollout import Rollout, RolloutEngine, SamplingParams

from .servers import ServedProcess
from .streaming_client import stream_generate

SAMPLES = 4
TOKENS = 64
KV_TOKENS = 16_384
_LATENCY_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class _Offline:
    rollouts: list[Rollout]
    seconds: float
    cpu_seconds: float
    latency: float  # of a request for one token, at its quickest

    @property
    def tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)


def _offline(model: Path, spec: str, threads: int) -> _Offline:
    engine = RolloutEngine.from_pretrained(
        str(model), spec=spec, num_threads=threads, max_kv_tokens=KV_TOKENS
    )
    prompts = _prompts(engine)
    engine.generate(prompts[:1], SamplingParams(max_new_tokens=4))  # warm
    engine.flush_cache()
    params = SamplingParams(max_new_tokens=TOKENS, seed=1, n=SAMPLES, ignore_eos=True)
    started, cpu_started = time.perf_counter(), time.process_time()
    rollouts = engine.generate(prompts, params)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    one = SamplingParams(max_new_tokens=1, seed=1)
    single: list[float] = []
    for _ in range(_LATENCY_ROUNDS):
        started = time.perf_counter()
        engine.generate(prompts[:1], one)
        single.append(time.perf_counter() - started)
    engine.close()
    return _Offline(rollouts, seconds, cpu_seconds, min(single))


def overhead(model: Path, spec: str, threads: int) -> list[Row]:
    """Bars are on processor time, which others on the machine disturb less than the clock."""
    offline = _offline(model, spec, threads)
    rollouts = offline.rollouts
    rows = [row("offline", offline.tokens / offline.seconds, "tokens/s")]
    ways = {"one call": _one_call, "a client per sample": _clients, "the same, streamed": _streams}
    for name, way in ways.items():
        server = ServedProcess(model, spec, threads, KV_TOKENS)
        try:
            latency = _latency(server.port, rollouts[0].prompt_ids)  # and warms it
            _flush(server.port)
            started, cpu_started = time.perf_counter(), server.cpu_seconds()
            got = asyncio.run(way(server.port, rollouts))
            seconds = time.perf_counter() - started
            cpu_seconds = server.cpu_seconds() - cpu_started
        finally:
            server.close()
        alike = sum(ids == rollout.token_ids for ids, rollout in zip(got, rollouts, strict=True))
        rows += [
            row(f"{name}: speed of offline", offline.seconds / seconds, "x"),
            row(
                f"{name}: processor time", cpu_seconds / offline.cpu_seconds, "x", 1.1, at_most=True
            ),
            row(f"{name}: rollouts alike", alike / len(rollouts), "share", 1.0),
        ]
    added = (latency - offline.latency) * 1e3
    rows.append(row("added to a request for one token", added, "ms", 10.0, at_most=True))
    return rows


def _prompts(engine: RolloutEngine) -> list[list[int]]:
    return [engine.encoder.encode(chat(text)) for text in OPEN_PROMPTS]


async def _one_call(port: int, rollouts: list[Rollout]) -> list[list[int]]:
    prompts = [rollout.prompt_ids for rollout in rollouts[::SAMPLES]]
    sampling = {"max_new_tokens": TOKENS, "seed": 1, "n": SAMPLES, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        body = {"input_ids": prompts, "sampling_params": sampling}
        answer = await client.post("/generate", json=body)
        return [each["output_ids"] for each in answer.raise_for_status().json()]


async def _clients(port: int, rollouts: list[Rollout]) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        answers = await asyncio.gather(
            *(client.post("/generate", json=_alone(rollout)) for rollout in rollouts)
        )
    return [answer.raise_for_status().json()["output_ids"] for answer in answers]


async def _streams(port: int, rollouts: list[Rollout]) -> list[list[int]]:
    streams = await asyncio.gather(*(stream_generate(port, _alone(each)) for each in rollouts))
    return [[] if stream.rollout is None else stream.rollout["output_ids"] for stream in streams]


def _alone(rollout: Rollout) -> dict[str, Any]:
    """One sample in a request of its own, with the seed it has offline."""
    sampling = {"max_new_tokens": TOKENS, "request_seed": rollout.seed, "ignore_eos": True}
    return {"input_ids": rollout.prompt_ids, "sampling_params": sampling}


def _latency(port: int, prompt: list[int]) -> float:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "seed": 1}}
    seconds: list[float] = []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        for _ in range(_LATENCY_ROUNDS):
            started = time.perf_counter()
            client.post("/generate", json=body).raise_for_status()
            seconds.append(time.perf_counter() - started)
    return min(seconds)


def _flush(port: int) -> None:
    httpx.post(f"http://127.0.0.1:{port}/flush_cache", timeout=60).raise_for_status()
