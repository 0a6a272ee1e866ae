"""Hundreds of clients at once, a few of them slow to read and a few gone before the end."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from table import Row, row

from rollout import RolloutEngine, SamplingParams

from .servers import ServedProcess
from .streaming_client import Stream, stream_generate

CLIENTS = 500
TOKENS = 16
KV_TOKENS = 16_384
_SLOW_EVERY, _GONE_EVERY = 20, 25
_LOOKED_AT = 25  # of the clients' rollouts, one in so many is compared with offline's


@dataclass(slots=True)
class _Run:
    streams: list[Stream]
    seconds: float
    status_seconds: list[float]  # of GET /status meanwhile
    left: dict[str, Any]  # GET /status afterwards


def many_clients(model: Path, threads: int) -> list[Row]:
    server = ServedProcess(model, "ngram", threads, KV_TOKENS)
    try:
        run = asyncio.run(_run(server.port))
    finally:
        server.close()
    quick = [s for i, s in enumerate(run.streams) if i % _SLOW_EVERY and i % _GONE_EVERY]
    whole = [s for i, s in enumerate(run.streams) if i % _GONE_EVERY]
    answered = sum(s.rollout is not None for s in whole)
    first = quantiles([s.first_token_seconds for s in quick], n=20)
    asked = quantiles(run.status_seconds, n=20)
    engine = run.left["engine"]
    unlike = _unlike_offline(model, run.streams)
    return [
        row("clients", len(run.streams), ""),
        row("answered of those that stayed", answered / len(whole), "share", 1.0),
        row("rollouts unlike offline's", unlike, "", 0.0, at_most=True),
        row("served", TOKENS * answered / run.seconds, "tokens/s"),
        row("first token, median", first[9], "s"),
        row("first token, 95 %", first[18], "s"),
        row("/status meanwhile, 95 %", asked[18], "s", 1.0, at_most=True),
        row("requests left", run.left["unfinished"], "", 0.0, at_most=True),
        row("KV slots left", engine["kv_used"], "", 0.0, at_most=True),
    ]


def _body(number: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS, "seed": number, "ignore_eos": True}
    return {"input_ids": _prompt(number), "sampling_params": sampling}


def _prompt(number: int) -> list[int]:
    return [3 + number % 5, 10 + number % 70, 10 + number // 70]


async def _run(port: int) -> _Run:
    randomness = random.Random(0)

    async def client(number: int) -> Stream:
        await asyncio.sleep(randomness.uniform(0, 1))
        is_slow = number % _SLOW_EVERY == 0
        return await stream_generate(
            port, _body(number),
            read_bytes=128 if is_slow else 2**16, pause=0.05 if is_slow else 0.0,
            leave_after_events=None if number % _GONE_EVERY else randomness.randint(1, 3),
        )  # fmt: skip

    started = time.perf_counter()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as watcher:
        clients = asyncio.gather(*(client(number) for number in range(CLIENTS)))
        asked: list[float] = []
        while not clients.done():
            before = time.perf_counter()
            (await watcher.get("/status")).raise_for_status()
            asked.append(time.perf_counter() - before)
            await asyncio.sleep(0.2)
        streams = await clients
        seconds = time.perf_counter() - started
        while (left := (await watcher.get("/status")).json())["unfinished"]:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.2)  # the engine's own view may be as old as that
        left = (await watcher.get("/status")).json()
    return _Run(streams, seconds, asked, left)


def _unlike_offline(model: Path, streams: list[Stream]) -> int:
    engine = RolloutEngine.from_pretrained(str(model), spec="none", max_kv_tokens=KV_TOKENS)
    unlike = 0
    for number, stream in list(enumerate(streams))[1::_LOOKED_AT]:
        if stream.rollout is None:
            continue
        params = SamplingParams(max_new_tokens=TOKENS, seed=number, ignore_eos=True)
        (expected,) = engine.generate([_prompt(number)], params)
        unlike += stream.rollout["output_ids"] != expected.token_ids
    return unlike
