"""Clients that wait, read slowly, leave, abort, score, or speak OpenAI's dialect."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.server_bench.streaming_client import stream_generate
from tests.soak.asks import Ask
from tests.soak.gate import Gate
from tests.soak.ledger import Event, Ledger
from tests.soak.policies import History
from tests.soak.reference import Checker


class Client:
    """One client after another, each of a kind drawn at random."""

    def __init__(
        self,
        name: str,
        rng: random.Random,
        asks: Sequence[Ask],
        http: httpx.AsyncClient,
        port: int,
        gate: Gate,
        ledger: Ledger,
        history: History,
        checker: Checker,
    ) -> None:
        self._name, self._rng, self._asks, self._http, self._port = name, rng, asks, http, port
        self._gate, self._ledger, self._history, self._checker = gate, ledger, history, checker

    async def run(self) -> None:
        kinds = {
            self.whole: 4, self.batch: 2, self.stream: 2, self.slow_stream: 1, self.leaves: 2,
            self.vanishes: 1, self.aborts: 2, self.scores: 1, self.completes: 1,
        }  # fmt: skip
        while True:
            await asyncio.sleep(self._rng.uniform(0, 0.25))
            kind = self._rng.choices(list(kinds), list(kinds.values()))[0]
            ask = self._rng.choice(self._asks)
            async with self._gate.passed():
                await kind(self._ledger.begin(self._name, kind.__name__), ask)

    async def whole(self, event: Event, ask: Ask) -> None:
        sent = self._history.now()
        answer = await self._generate(event, self._body(ask))
        if answer is not None:
            await self._checker.rollout(event, ask, answer, sent)
            await self._resume_cut(event, ask, answer)

    async def batch(self, event: Event, ask: Ask) -> None:
        asks = [ask, *self._rng.choices(self._asks, k=2)]
        sent = self._history.now()
        sampling = [each.sampling for each in asks]
        sampling[1] = sampling[1] | {"n": 2}
        body = {
            "input_ids": [list(each.prompt) for each in asks],
            "sampling_params": sampling,
            "return_logprob": True,
        }
        answers = await self._generate(event, body)
        if answers is None:
            return
        self._ledger.require(len(answers) == 4, event, f"{len(answers)} answers instead of 4")
        indices = ((0, 0), (1, 0), (1, 1), (2, 0))
        for each, answer in zip(indices, answers, strict=False):
            await self._checker.rollout(event, asks[each[0]], answer, sent, indices=each)

    async def stream(self, event: Event, ask: Ask) -> None:
        await self._stream(event, ask)

    async def slow_stream(self, event: Event, ask: Ask) -> None:
        await self._stream(event, ask, read_bytes=256, pause=0.002)

    async def leaves(self, event: Event, ask: Ask) -> None:
        """In the middle of a stream."""
        await self._stream(event, ask, leave_after_events=self._rng.randint(1, 3))

    async def vanishes(self, event: Event, ask: Ask) -> None:
        """Closes the connection before there is an answer, if that takes long enough."""
        sent, patience = self._history.now(), self._rng.uniform(0, 0.1)
        try:
            async with asyncio.timeout(patience):
                answer = await self._generate(event, self._body(ask))
        except TimeoutError:
            return
        if answer is not None:
            await self._checker.rollout(event, ask, answer, sent)

    async def aborts(self, event: Event, ask: Ask) -> None:
        """Its own request, by name; then it goes on with it, as trainers do."""
        rid, patience = f"{event.stream}-{event.number}", self._rng.uniform(0, 0.15)
        sent = self._history.now()

        async def abort() -> None:
            await asyncio.sleep(patience)
            answer = await self._http.post("/abort_request", json={"rid": rid})
            self._ledger.require(answer.status_code == 200, event, answer.text)

        body = self._body(ask) | {"rid": rid}
        answer, _ = await asyncio.gather(self._generate(event, body), abort())
        if answer is not None:
            await self._checker.rollout(event, ask, answer, sent, aborted_itself=True)
            await self._resume_cut(event, ask, answer)

    async def scores(self, event: Event, ask: Ask) -> None:
        others = [token for each in self._rng.choices(self._asks, k=3) for token in each.prompt]
        ids, sent = [*ask.prompt, *others], self._history.now()
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._generate(event, body)
        if answer is not None:
            entries = answer["meta_info"]["input_token_logprobs"]
            await self._checker.score(event, ids, [entry[0] for entry in entries[1:]], sent)

    async def completes(self, event: Event, ask: Ask) -> None:
        """In OpenAI's dialect."""
        sampling, sent = dict(ask.sampling), self._history.now()
        body = {
            "prompt": list(ask.prompt),
            "max_tokens": sampling.pop("max_new_tokens"),
            "min_tokens": sampling.pop("min_new_tokens", None),
            "logprobs": 1,
            "return_token_ids": True,
            **sampling,
        }
        answer = await self._http.post("/v1/completions", json=body)
        self._ledger.require(
            answer.status_code == 200, event, f"{answer.status_code} {answer.text}"
        )
        if answer.status_code == 200:
            await self._checker.completion(event, ask, answer.json()["choices"][0], sent)

    async def _resume_cut(self, event: Event, ask: Ask, answer: dict[str, Any]) -> None:
        """Send prompt and partial output again, where an abort cut it."""
        meta, done = answer["meta_info"], answer["output_ids"]
        left = ask.sampling["max_new_tokens"] - len(done)
        if meta["finish_reason"]["type"] != "abort" or not left or not ask.is_resumable:
            return
        self._ledger.count("rollouts", "gone on after an abort")
        sampling = ask.sampling | {"max_new_tokens": left, "request_seed": meta["request_seed"]}
        sent = self._history.now()
        body = self._body(ask) | {"input_ids": [*ask.prompt, *done], "sampling_params": sampling}
        rest = await self._generate(event, body)
        if rest is not None:
            await self._checker.rollout(event, ask, rest, sent, done=done)

    async def _stream(self, event: Event, ask: Ask, **manner: Any) -> None:
        sent = self._history.now()
        stream = await stream_generate(self._port, self._body(ask), **manner)
        self._ledger.require(
            stream.status == 200 and stream.error is None, event, f"{stream.status} {stream.error}"
        )
        self._ledger.require(stream.sizes == sorted(stream.sizes), event, f"sizes {stream.sizes}")
        if stream.rollout is not None:
            await self._checker.rollout(event, ask, stream.rollout, sent)

    async def _generate(self, event: Event, body: dict[str, Any]) -> Any:
        """The answer's JSON; None where it is an error, which is a violation."""
        answer = await self._http.post("/generate", json=body)
        is_fine = answer.status_code == 200
        self._ledger.require(is_fine, event, f"{answer.status_code} {answer.text}: {body}")
        return answer.json() if is_fine else None

    def _body(self, ask: Ask) -> dict[str, Any]:
        return {
            "input_ids": list(ask.prompt),
            "sampling_params": ask.sampling,
            "return_logprob": True,
        }
