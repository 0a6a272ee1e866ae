"""Events that change the engine for all: weights, pauses, aborts, sleep, flushes, a freeze."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save

from rollout.weights.shared_memory import SharedMemorySender
from tests.soak.ledger import Event, Ledger
from tests.soak.policies import History
from tests.soak.server_process import ServerProcess

_RAW = {"Content-Type": "application/octet-stream"}
_TENSORS = "/update_weights_from_tensor"
_DISK = "/update_weights_from_disk"


class Changes:
    """One change after another; each leaves the engine running.

    ``exclusive`` is held where a stranger's call in between would be taken for a part of it.
    """

    def __init__(
        self,
        rng: random.Random,
        folders: Sequence[Path],
        http: httpx.AsyncClient,
        server: ServerProcess,
        ledger: Ledger,
        history: History,
        exclusive: asyncio.Lock,
    ) -> None:
        self._rng, self._folders, self._http, self._server = rng, folders, http, server
        self._ledger, self._history, self._exclusive = ledger, history, exclusive
        self._kinds = {
            self.update: 6, self.update_in_buckets: 2, self.update_in_parts: 2,
            self.update_torn: 1, self.update_refused: 1, self.update_partly: 1,
            self.pause: 3, self.abort_all: 1, self.flush: 2, self.sleep: 2, self.freeze: 1,
        }  # fmt: skip

    async def one(self) -> None:
        kind = self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        await kind(self._ledger.begin("changes", kind.__name__))

    async def update(self, event: Event) -> None:
        """Whole, in one call, by any transport that needs no other process."""
        policy, options = self._draw(), self._draw_options()
        transport = self._rng.choice(["tensor", "disk", "shared memory"])
        self._ledger.count("changes", f"update by {transport}, {_named(options)}")
        async with self._updating(policy, options) as version:
            options = options | {"weight_version": version}
            if transport == "tensor":
                await self._send(event, load_file(self._file(policy)), options)
            elif transport == "disk":
                body = {"model_path": self._folders[policy].name} | options
                await self._post(event, _DISK, body)
            else:
                tensors = load_file(self._file(policy))
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                # Segments of half the weights: four hold all buckets at once.
                with SharedMemorySender(2 * num_bytes, num_segments=4) as sender:
                    body = {"handles": list(sender.handles(tensors.items()))} | options
                    await self._post(event, "/update_weights_from_ipc", body)

    async def update_in_buckets(self, event: Event) -> None:
        """Between pause and continue, as trainers that speak sglang's dialect do."""
        policy, options = self._draw(), self._draw_options()
        async with (
            self._exclusive,
            self._updating(policy, options) as version,
            self._paused(event, self._draw_mode()),
        ):
            for part in self._halves(policy):
                await self._send(event, part, options | {"weight_version": version})

    async def update_in_parts(self, event: Event) -> None:
        policy, options = self._draw(), self._draw_options()
        async with self._exclusive, self._updating(policy, options) as version:
            options = options | {"weight_version": version}
            await self._post(event, "/begin_weight_update", options)
            for part in self._halves(policy):
                await asyncio.sleep(self._rng.uniform(0, 0.2))
                await self._send(event, part, options)
            await self._post(event, "/end_weight_update", {})

    async def update_torn(self, event: Event) -> None:
        """Given up half-way; nothing runs until a full one has come."""
        first, second = self._draw(), self._draw()
        async with self._exclusive:
            async with self._updating(first, {}) as version:
                await self._post(event, "/begin_weight_update", {"weight_version": version})
                await self._send(event, self._halves(first)[0], {"weight_version": version})
                await self._post(event, "/abandon_weight_update", {"reason": "the soak"})
            await self._post(event, "/continue_generation", {}, refused="torn")
            await asyncio.sleep(self._rng.uniform(0, 0.5))
            async with self._updating(second, {}) as version:
                body = {"model_path": self._folders[second].name, "weight_version": version}
                await self._post(event, _DISK, body)

    async def update_refused(self, event: Event) -> None:
        """A name too many: nothing is written."""
        tensors = load_file(self._file(self._draw()))
        name = next(iter(tensors))
        tensors["nothing.of.that.name"] = tensors[name].clone()
        async with self._exclusive:
            await self._send(event, tensors, {}, refused="nothing.of.that.name")
        answer = await self._http.get("/get_weight_version")
        version = int(answer.json()["weight_version"])
        self._ledger.require(
            version == self._history.version, event, f"version {version} after a refused update"
        )

    async def update_partly(self, event: Event) -> None:
        """Some tensors, with the values they have; the version is another."""
        policy, options = self._policy, self._draw_options()
        async with self._exclusive, self._updating(policy, options) as version:
            part = self._halves(policy)[0]
            await self._send(event, part, options | {"weight_version": version, "partial": True})

    async def pause(self, event: Event) -> None:
        async with self._exclusive, self._paused(event, self._draw_mode()):
            await asyncio.sleep(self._rng.uniform(0, 0.5))

    async def abort_all(self, event: Event) -> None:
        self._history.aborts_begun += 1
        await self._post(event, "/abort_request", {"abort_all": True}, key="aborted")
        self._history.aborts_ended += 1

    async def flush(self, event: Event) -> None:
        """Flush the cache, which needs an idle engine and is refused otherwise."""
        answer = await self._http.post("/flush_cache", params={"timeout": self._rng.choice([0, 1])})
        self._ledger.count("changes", f"flush {answer.status_code}")
        known = answer.status_code in (200, 400)
        self._ledger.require(known, event, f"{answer.status_code} {answer.text}")

    async def sleep(self, event: Event) -> None:
        """Memory given back and taken again; weights that were not kept are sent anew."""
        tags = self._rng.choice([["kv_cache"], ["weights"], ["kv_cache", "weights"]])
        keeps = "weights" not in tags or self._rng.random() < 0.6
        self._ledger.count("changes", f"sleep {'+'.join(tags)}{'' if keeps else ', weights lost'}")
        async with self._exclusive:
            body = {"tags": tags, "keep_weights": keeps}
            await self._post(event, "/release_memory_occupation", body)
            await asyncio.sleep(self._rng.uniform(0, 0.5))
            order = self._rng.choice([[tags], [[tag] for tag in reversed(tags)]])
            for each in order:
                await self._post(event, "/resume_memory_occupation", {"tags": each})
            if not keeps:
                policy = self._draw()
                async with self._updating(policy, {}) as version:
                    await self._send(
                        event, load_file(self._file(policy)), {"weight_version": version}
                    )

    async def freeze(self, event: Event) -> None:
        """The process is stopped for a while, as by a debugger or a laptop's lid."""
        self._server.signal(signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0.1, 1.0))
        self._server.signal(signal.SIGCONT)

    @property
    def _policy(self) -> int:
        return self._history.installed[self._history.version].policy

    def _draw(self) -> int:
        return self._rng.randrange(len(self._folders))

    def _draw_mode(self) -> str:
        return self._rng.choice(["abort", "retract", "in_place"])

    def _draw_options(self) -> dict[str, Any]:
        return self._rng.choice([{}, {}, {"flush_cache": False}, {"abort_all_requests": True}])

    def _file(self, policy: int) -> Path:
        return self._folders[policy] / "model.safetensors"

    def _halves(self, policy: int) -> list[dict[str, Any]]:
        items = sorted(load_file(self._file(policy)).items())
        middle = len(items) // 2
        return [dict(items[:middle]), dict(items[middle:])]

    @asynccontextmanager
    async def _updating(self, policy: int, options: dict[str, Any]) -> AsyncIterator[int]:
        """Gives the version to send."""
        history = self._history
        recomputed = options.get("flush_cache", True)
        aborts = options.get("abort_all_requests", False)
        version = history.next_version(policy, recomputed)
        history.updates_begun += 1
        history.aborts_begun += aborts
        yield version
        history.version = version
        history.updates_ended += 1
        history.aborts_ended += aborts

    @asynccontextmanager
    async def _paused(self, event: Event, mode: str) -> AsyncIterator[None]:
        self._ledger.count("changes", f"pause {mode}")
        aborts = mode == "abort"
        self._history.aborts_begun += aborts
        await self._post(event, "/pause_generation", {"mode": mode})
        self._history.aborts_ended += aborts
        yield
        await self._post(event, "/continue_generation", {})

    async def _send(
        self, event: Event, tensors: dict[str, Any], options: dict[str, Any], refused: str = ""
    ) -> None:
        """Tensors as the body, the options in the query."""
        query = {name: str(value).lower() for name, value in options.items()}
        answer = await self._http.post(_TENSORS, content=save(tensors), headers=_RAW, params=query)
        self._check(event, _TENSORS, answer, refused)

    async def _post(
        self,
        event: Event,
        path: str,
        body: dict[str, Any],
        *,
        refused: str = "",
        key: str = "success",
    ) -> None:
        self._check(event, path, await self._http.post(path, json=body), refused, key)

    def _check(
        self, event: Event, path: str, answer: httpx.Response, refused: str, key: str = "success"
    ) -> None:
        """``refused``: a part of the message with which it must be refused; empty: it must not."""
        if refused:
            is_right = answer.status_code == 400 and refused in answer.json()["message"]
        else:
            is_right = answer.status_code == 200 and answer.json()[key] is not False
        self._ledger.require(is_right, event, f"{path}: {answer.status_code} {answer.text}")


def _named(options: dict[str, Any]) -> str:
    if options.get("abort_all_requests"):
        return "requests aborted"
    return "requests recompute" if options.get("flush_cache", True) else "in place"
