"""Question: what does HTTP cost beside the engine it serves, and what do careless clients do to it?

    python benchmarks/bench_server.py [--only overhead|clients|malformed] [--json FILE]

overhead: the same requests offline, in one call, by a client per sample, and streamed. Bars: 1.1x
the processor time, which others on the machine disturb less than the clock; the same rollouts;
10 ms more for a request of one token.
clients: 500 at once, some slow to read, some gone before the end. Bars: every one that stayed is
answered with the tokens of offline generation; /status answers within a second; nothing is left.
malformed: 10,000 requests that are wrong in many ways. Bars: no error of the server, nothing
left in the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from statistics import quantiles
from typing import Any

import httpx
from harness.command import Command, parts_of
from harness.prompts import OPEN_PROMPTS, chat
from harness.rows import Row, row
from harness.timing import wall_seconds
from server_bench.malformed import KINDS, is_fault, send_malformed
from server_bench.servers import Server, served
from server_bench.streaming_client import Stream, stream_generate

from rollout import Rollout, RolloutEngine, SamplingParams

KV_TOKENS = 16_384
SAMPLES = 4
LATENCY_ROUNDS = 20
CLIENT_TOKENS = 16
SLOW_EVERY, GONE_EVERY = 20, 25
CHECKED_EVERY = 25  # of the clients' rollouts, one in so many is compared with offline's
MALFORMED_CONTEXT = 64  # of requests without a limit of their own: they soon end

none_left = partial(row, bar=0.0, at_most=True)


def overhead_rows(options: argparse.Namespace) -> Iterator[Row]:
    engine = RolloutEngine.from_pretrained(
        str(options.model), spec="none", num_threads=options.threads, max_kv_tokens=KV_TOKENS
    )
    prompts = [engine.encoder.encode(chat(text)) for text in OPEN_PROMPTS]
    engine.generate(prompts[:1], SamplingParams(max_new_tokens=4))  # warm
    engine.flush_cache()
    params = SamplingParams(max_new_tokens=options.tokens, seed=1, n=SAMPLES, ignore_eos=True)
    started, cpu_started = time.perf_counter(), time.process_time()
    rollouts = engine.generate(prompts, params)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    one = SamplingParams(max_new_tokens=1, seed=1)
    offline_latency = quickest(lambda: engine.generate(prompts[:1], one))
    engine.close()
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    yield row("offline", tokens / seconds, "tokens/s")

    ways = {"one call": _one_call, "a client per sample": _clients, "the same, streamed": _streams}
    for name, way in ways.items():
        with _served(options, "none") as server:
            latency = _latency(server.url, rollouts[0].prompt_ids)  # and warms it
            httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
            started, cpu_started = time.perf_counter(), server.cpu_seconds()
            got = asyncio.run(way(server, rollouts, options.tokens))
            took = time.perf_counter() - started
            cpu_served = server.cpu_seconds() - cpu_started
        same = sum(ids == rollout.token_ids for ids, rollout in zip(got, rollouts, strict=True))
        yield row(f"{name}: speed of offline", seconds / took, "x")
        yield row(f"{name}: processor time", cpu_served / cpu_seconds, "x", 1.1, at_most=True)
        yield row(f"{name}: rollouts alike", same / len(rollouts), "share", 1.0)
    added = (latency - offline_latency) * 1e3
    yield row("added to a request for one token", added, "ms", 10.0, at_most=True)


def _served(options: argparse.Namespace, spec: str) -> AbstractContextManager[Server]:
    threads, slots = f"num_threads={options.threads}", f"memory.max_kv_tokens={KV_TOKENS}"
    return served(options.model, f"spec={spec}", threads, slots)


def quickest(call: Any) -> float:
    return min(wall_seconds(call) for _ in range(LATENCY_ROUNDS))


def _latency(url: str, prompt: list[int]) -> float:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "seed": 1}}
    with httpx.Client(base_url=url, timeout=60) as client:
        return quickest(lambda: client.post("/generate", json=body).raise_for_status())


async def _one_call(server: Server, rollouts: list[Rollout], tokens: int) -> list[list[int]]:
    prompts = [rollout.prompt_ids for rollout in rollouts[::SAMPLES]]
    sampling = {"max_new_tokens": tokens, "seed": 1, "n": SAMPLES, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        body = {"input_ids": prompts, "sampling_params": sampling}
        answer = await client.post("/generate", json=body)
        return [each["output_ids"] for each in answer.raise_for_status().json()]


async def _clients(server: Server, rollouts: list[Rollout], tokens: int) -> list[list[int]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        answers = await asyncio.gather(
            *(client.post("/generate", json=_alone(rollout, tokens)) for rollout in rollouts)
        )
    return [answer.raise_for_status().json()["output_ids"] for answer in answers]


async def _streams(server: Server, rollouts: list[Rollout], tokens: int) -> list[list[int]]:
    streams = await asyncio.gather(
        *(stream_generate(server.port, _alone(rollout, tokens)) for rollout in rollouts)
    )
    return [[] if stream.rollout is None else stream.rollout["output_ids"] for stream in streams]


def _alone(rollout: Rollout, tokens: int) -> dict[str, Any]:
    """One sample in a request of its own, with the seed it has offline."""
    sampling = {"max_new_tokens": tokens, "request_seed": rollout.seed, "ignore_eos": True}
    return {"input_ids": rollout.prompt_ids, "sampling_params": sampling}


def client_rows(options: argparse.Namespace) -> Iterator[Row]:
    with _served(options, "ngram") as server:
        streams, seconds, status_seconds = asyncio.run(_run_clients(server, options.clients))
        left = list(left_rows(server.url))
    quick = [s for i, s in enumerate(streams) if i % SLOW_EVERY and i % GONE_EVERY]
    stayed = [s for i, s in enumerate(streams) if i % GONE_EVERY]
    answered = sum(stream.rollout is not None for stream in stayed)
    first = quantiles([stream.first_token_seconds for stream in quick], n=20)
    yield row("clients", len(streams), "")
    yield row("answered of those that stayed", answered / len(stayed), "share", 1.0)
    yield none_left("rollouts unlike offline's", _unlike_offline(options, streams), "")
    yield row("served", CLIENT_TOKENS * answered / seconds, "tokens/s")
    yield row("first token, median", first[9], "s")
    yield row("first token, 95 %", first[18], "s")
    asked = quantiles(status_seconds, n=20)
    yield row("/status meanwhile, 95 %", asked[18], "s", 1.0, at_most=True)
    yield from left


def left_rows(url: str) -> Iterator[Row]:
    """The resources that a server holds when nobody asks for anything."""
    with httpx.Client(base_url=url, timeout=60) as watcher:
        while watcher.get("/status").json()["unfinished"]:
            time.sleep(0.1)
        time.sleep(0.2)  # the engine's own view may be as old as that
        left = watcher.get("/status").json()
    yield none_left("requests left", left["unfinished"], "")
    yield none_left("KV slots left", left["engine"]["kv_used"], "")


def _prompt(number: int) -> list[int]:
    return [3 + number % 5, 10 + number % 70, 10 + number // 70]


async def _run_clients(server: Server, count: int) -> tuple[list[Stream], float, list[float]]:
    """Streams, the seconds of all, and those of each GET /status meanwhile."""
    randomness = random.Random(0)

    async def client(number: int) -> Stream:
        await asyncio.sleep(randomness.uniform(0, 1))
        is_slow = number % SLOW_EVERY == 0
        sampling = {"max_new_tokens": CLIENT_TOKENS, "seed": number, "ignore_eos": True}
        return await stream_generate(
            server.port, {"input_ids": _prompt(number), "sampling_params": sampling},
            read_bytes=128 if is_slow else 2**16, pause=0.05 if is_slow else 0.0,
            leave_after_events=None if number % GONE_EVERY else randomness.randint(1, 3),
        )  # fmt: skip

    started = time.perf_counter()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as watcher:
        clients = asyncio.gather(*(client(number) for number in range(count)))
        asked: list[float] = []
        while not clients.done():
            before = time.perf_counter()
            (await watcher.get("/status")).raise_for_status()
            asked.append(time.perf_counter() - before)
            await asyncio.sleep(0.2)
        return await clients, time.perf_counter() - started, asked


def _unlike_offline(options: argparse.Namespace, streams: list[Stream]) -> int:
    engine = RolloutEngine.from_pretrained(str(options.model), spec="none", max_kv_tokens=KV_TOKENS)
    unlike = 0
    for number, stream in list(enumerate(streams))[1::CHECKED_EVERY]:
        if stream.rollout is not None:
            params = SamplingParams(max_new_tokens=CLIENT_TOKENS, seed=number, ignore_eos=True)
            (expected,) = engine.generate([_prompt(number)], params)
            unlike += stream.rollout["output_ids"] != expected.token_ids
    return unlike


def malformed_rows(options: argparse.Namespace) -> Iterator[Row]:
    overrides = (
        f"model.max_context_len={MALFORMED_CONTEXT}", "memory.max_kv_tokens=8192",
        f"num_threads={options.threads}", "server.model_name=m", "server.max_prompt_len=32",
    )  # fmt: skip
    with served(options.model, *overrides) as server:
        started = time.perf_counter()
        sending = send_malformed(server.port, options.malformed, num_clients=24, timeout=120.0)
        by_kind = asyncio.run(sending)
        seconds = time.perf_counter() - started
        left = list(left_rows(server.url))
    refused = faults = 0
    for kind, counts in by_kind.items():
        print(kind, *(f"{status}: {count}" for status, count in sorted(counts.items())))
        refused += sum(count for status, count in counts.items() if "400" <= status < "500")
        ending = KINDS[kind][1]
        faults += sum(count for status, count in counts.items() if is_fault(status, ending))
    yield row("refused", refused, "")
    yield none_left("errors of the server, or no answer", faults, "")
    yield from left
    yield row("handled", options.malformed / seconds, "requests/s")


PARTS = {"overhead": overhead_rows, "clients": client_rows, "malformed": malformed_rows}


def make_command() -> Command:
    command = Command(__doc__)
    command.model()
    command.threads(2)
    command.option("--tokens", 64, quick=8, help="of each sample of the overhead")
    command.option("--clients", 500, quick=60, help="at once")
    command.option("--malformed", 10_000, quick=220, help="malformed requests")
    return command


if __name__ == "__main__":
    make_command().run("server, {model.name}, {threads} threads", parts_of(PARTS))
