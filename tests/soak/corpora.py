"""External corpora come and go."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx

from tests.soak.gate import Gate
from tests.soak.ledger import Event, Ledger

_MAX_CORPORA = 4  # at a time


class Corpora:
    """Adds and removes them, well and badly, and knows which there must be."""

    def __init__(
        self,
        rng: random.Random,
        root: Path,
        vocab_size: int,
        http: httpx.AsyncClient,
        gate: Gate,
        ledger: Ledger,
    ) -> None:
        self._rng, self._root, self._vocab_size = rng, root, vocab_size
        self._http, self._gate, self._ledger = http, gate, ledger
        self._names: set[str] = set()
        (root / "words.jsonl").write_text(json.dumps("one two three four " * 50) + "\n")
        (root / "broken.jsonl").write_text('"one two"\n{\n')

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.1, 1.5))
            kinds = [self.add, self.add_file, self.add_badly, self.remove, self.cancel]
            kind = self._rng.choice(kinds)
            async with self._gate.passed():
                event = self._ledger.begin("corpora", kind.__name__)
                await kind(event)
                await self._compare(event)

    async def add(self, event: Event) -> None:
        length = self._rng.choice([10, 1_000, 50_000])
        chunk = [self._rng.randrange(self._vocab_size) for _ in range(length)]
        await self._add(event, {"token_chunks": [chunk]})

    async def add_file(self, event: Event) -> None:
        await self._add(event, {"file_path": "words.jsonl"})

    async def add_badly(self, event: Event) -> None:
        """Nothing is kept of it."""
        sources: list[dict[str, Any]] = [
            {"file_path": "broken.jsonl"}, {"file_path": "../words.jsonl"}, {"documents": []},
            {"token_chunks": [[self._vocab_size]]}, {"documents": ["one"], "token_chunks": [[1]]},
        ]  # fmt: skip
        body = {"corpus_id": "bad"} | self._rng.choice(sources)
        await self._post(event, "/add_external_corpus", body, {400, 422})

    async def remove(self, event: Event) -> None:
        name = self._rng.choice(sorted(self._names) or ["unknown"])
        expected = {200} if name in self._names else {404}
        await self._post(event, "/remove_external_corpus", {"corpus_id": name}, expected)
        self._names.discard(name)

    async def cancel(self, event: Event) -> None:
        """A load that has just begun."""
        chunk = [self._rng.randrange(self._vocab_size) for _ in range(50_000)]
        body = {"corpus_id": "cancelled", "token_chunks": [chunk], "wait": False}
        await self._post(event, "/add_external_corpus", body, {200})
        body = {"corpus_id": "cancelled"}
        await self._post(event, "/remove_external_corpus", body, {200})

    async def _add(self, event: Event, source: dict[str, Any]) -> None:
        """Under a name that may be taken; where there are many, one is removed first."""
        if len(self._names) >= _MAX_CORPORA:
            await self.remove(event)
        name = f"corpus{self._rng.randrange(2 * _MAX_CORPORA)}"
        expected = {409} if name in self._names else {200}
        await self._post(event, "/add_external_corpus", {"corpus_id": name} | source, expected)
        self._names.add(name)

    async def _compare(self, event: Event) -> None:
        answer = await self._http.get("/list_external_corpora")
        found = {each["corpus_id"] for each in answer.json()["corpora"]}
        self._ledger.require(found == self._names, event, f"{found} instead of {self._names}")

    async def _post(
        self, event: Event, path: str, body: dict[str, Any], expected: set[int]
    ) -> None:
        answer = await self._http.post(path, json=body)
        self._ledger.count("corpora", f"{path} {answer.status_code}")
        self._ledger.require(
            answer.status_code in expected, event, f"{path}: {answer.status_code} {answer.text}"
        )
