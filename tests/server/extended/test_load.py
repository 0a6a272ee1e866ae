"""Under load, with slow and leaving clients, all tokens are those of offline rollouts."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.server_bench.streaming_client import Stream, stream_generate
from rollout import Rollout, RolloutEngine, SamplingParams
from tests.helpers.hang import HANG_SECONDS
from tests.server.conftest import run_server
from tests.server.policies import Policy, policy

SAMPLING = {"temperature": 0.9, "ignore_eos": True}


@pytest.fixture(scope="module")
def policies(text_model_path, weights_root) -> list[Policy]:
    return [policy(weights_root / f"policy{seed}", seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def live(text_model_path, weights_root):
    options = {"weights_root": str(weights_root), "corpora_root": str(weights_root)}
    with run_server(text_model_path, {"max_running": 16}, options) as live:
        yield live


def prompt(client: int) -> list[int]:
    return [3 + client % 7, 10 + client % 80, 11]


def body(client: int, tokens: int) -> dict[str, Any]:
    sampling = SAMPLING | {"max_new_tokens": tokens, "seed": client}
    return {"input_ids": prompt(client), "sampling_params": sampling, "return_logprob": True}


def params(client: int, tokens: int) -> SamplingParams:
    return SamplingParams(**SAMPLING, max_new_tokens=tokens, seed=client)


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_weights_and_corpora_change_under_load(live, policies, text_model_path):
    """Each token is what an engine with the weights of its version would have sampled there."""
    port = urlsplit(live.url).port

    async def run() -> list[Stream]:
        async with (
            asyncio.timeout(HANG_SECONDS),
            httpx.AsyncClient(base_url=live.url, timeout=HANG_SECONDS) as admin,
        ):
            clients: list[asyncio.Task[Stream]] = []

            def start_ten() -> None:
                for number in range(len(clients), len(clients) + 10):
                    generating = stream_generate(port, body(number, 100))
                    clients.append(asyncio.create_task(generating))

            start_ten()
            for index, each in enumerate(policies):  # some of the last ten have ended by then
                while sum(task.done() for task in clients) < 5 + 10 * index:
                    await asyncio.sleep(0.01)
                corpus = {"corpus_id": f"c{index}", "token_chunks": [[5, 6, 7, 8] * 200]}
                update = {"model_path": str(each.folder), "weight_version": str(index + 1)}
                answers = await asyncio.gather(
                    admin.post("/add_external_corpus", json=corpus),
                    admin.post("/update_weights_from_disk", json=update),
                )
                removed = {"corpus_id": f"c{index}"}
                answers.append(await admin.post("/remove_external_corpus", json=removed))
                assert all(answer.json()["success"] for answer in answers)
                start_ten()
            return await asyncio.gather(*clients)

    streams = asyncio.run(run())
    live.wait_until_idle()
    folders = [text_model_path, *(each.folder for each in policies)]
    engines = [RolloutEngine.from_pretrained(folder, spec="none") for folder in folders]
    seen: set[int] = set()
    for number, stream in enumerate(streams):
        answer = stream.rollout
        assert answer is not None
        done: list[int] = []
        values: list[float] = []
        for span in answer["meta_info"]["weight_versions"]:
            version, start, end = int(span["version"]), span["start"], span["end"]
            assert start == len(done)
            expected = continued(engines[version], number, done, end - start)
            done += expected.token_ids
            values += expected.logprobs
            seen.add(version)
        assert answer["output_ids"] == done, number
        assert logprobs(answer) == values
    assert seen == {0, 1, 2, 3}


def continued(engine: RolloutEngine, number: int, done: list[int], count: int) -> Rollout:
    """The next ``count`` tokens of a client's rollout after those it has."""
    wanted = params(number, len(done) + count)
    request = engine.submit(prompt(number), wanted, partial_ids=done)
    while True:
        for rollout in engine.step():
            assert rollout.request_id == request.request_id
            return rollout
