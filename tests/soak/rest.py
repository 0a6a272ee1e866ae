"""Facts that must hold of a server whenever nothing runs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, fields

import httpx

from tests.soak.ledger import Event, Ledger
from tests.soak.policies import History
from tests.soak.reference import References
from tests.soak.server_process import ServerProcess, Usage, gauges

_REST_SECONDS = 60.0  # that requests of clients who left have to end
_WARM_UP = 4  # looks that only say what is normal
_GROWTH = {"resident_mib": 64, "files": 8, "threads": 4, "segments": 4}
"""By field of `Usage`: more than this beyond what was normal is a leak."""


class Rest:
    """Looks at the server in rest: its books, its weights, and what it holds of the machine."""

    def __init__(
        self,
        server: ServerProcess,
        http: httpx.AsyncClient,
        ledger: Ledger,
        history: History,
        references: References,
    ) -> None:
        self._server, self._http, self._ledger = server, http, ledger
        self._history, self._references = history, references
        self.usages: list[Usage] = []

    async def look(self) -> None:
        event = self._ledger.begin("rest", "look")
        require = self._ledger.require
        found = await self._gauges_in_rest()
        for name in (
            "requests_unfinished",
            "requests_running",
            "requests_waiting",
            "kv_slots_used",
        ):
            require(found[name] == 0, event, f"{name} is {found[name]} in rest")
        require(found["can_run"] == 1, event, "the engine cannot run")
        answer = await self._http.post("/flush_cache")
        require(answer.status_code == 200, event, f"flush: {answer.status_code} {answer.text}")
        cached = (await self._fresh_gauges())["kv_slots_cached"]
        require(cached == 0, event, f"{cached} slots are cached after a flush")
        answer = await self._http.post("/weights_checker", json={"action": "checksum"})
        policy = self._history.installed[self._history.version].policy
        is_known = answer.json().get("per_engine_checksum") == self._references.digests[policy]
        require(is_known, event, f"the weights are not policy {policy}'s: {answer.text}")
        left = [path.name for path in self._server.temporary.iterdir()]
        require(not left, event, f"temporary files {left}")
        self._compare_usage(event)

    async def sum_up(self) -> None:
        """Note what the server did in all."""
        found = await gauges(self._http)
        for name in ("generated_tokens", "accepted_tokens", "cached_prompt_tokens", "preemptions"):
            self._ledger.count("server", name, int(found[f"{name}_total"]))
        for name, value in asdict(self.usages[-1]).items():
            self._ledger.count("server", f"{name} at the end", value)

    async def _gauges_in_rest(self) -> dict[str, float]:
        deadline = time.monotonic() + _REST_SECONDS
        while True:
            found = await self._fresh_gauges()
            if not found["requests_unfinished"] or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.1)

    async def _fresh_gauges(self) -> dict[str, float]:
        """From a status that is younger than this call: an older one is shown to who is early."""
        asked = now = time.monotonic()
        while now < asked + _REST_SECONDS:
            found = await gauges(self._http)
            if found["status_age_seconds"] < now - asked:
                return found
            await asyncio.sleep(0.1)
            now = time.monotonic()
        raise RuntimeError(f"the server's status is not renewed: {found}")

    def _compare_usage(self, event: Event) -> None:
        """With the warm-up's, memory with the first half's: oneDNN keeps what it compiled for each
        number of rows, so the process grows until all of them have been seen. Memory by the least
        of three looks: buffers come and go."""
        self.usages.append(self._server.usage())
        for name in (field.name for field in fields(Usage)):
            values = [getattr(usage, name) for usage in self.usages]
            num_normal = max(_WARM_UP, len(values) // 2 if name == "resident_mib" else 0)
            normal, last = values[:num_normal], values[num_normal:][-3:]
            if len(last) == 3:
                self._ledger.require(
                    min(last) <= max(normal) + _GROWTH[name],
                    event,
                    f"{name} grew from {max(normal)} to {min(last)}",
                )
