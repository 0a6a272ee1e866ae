"""Disturbs one `specrollout serve` at random, and compares every rollout with an undisturbed one.

    python -m tests.soak --seconds 3600 --seed 1 [--model FOLDER] [--spec ngram]

Clients generate, leave and abort while weights are updated, torn and healed, and while the server
is paused, put to sleep and frozen. A rollout's tokens and logprobs under each weight version must
be those of a plain engine with that policy which continues from the earlier tokens. Now and then
the server comes to rest: no request, no slot in use, the policy's digest, no growing memory.
Prints each violation with the seed; exit code 1 where there was one. The seed decides what each
client and the changes do, not the moments at which they meet.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import load_file, save, save_file

from rollout import RolloutEngine, SamplingParams
from tests.helpers.text_model import save_text_model
from tests.server.server_process import served

POLICIES = 3
REST_SECONDS = 15.0
MAX_GROWTH_MIB = 64  # beyond the first half of the looks
OPTIONS = (
    "model.max_context_len=512", "memory.max_kv_tokens=640", "scheduler.max_running=8",
    "scheduler.max_step_tokens=64", "scheduler.chunk_len=16", "spec.corpus_bytes=1048576",
)  # fmt: skip


class Soak:
    def __init__(self, http: httpx.AsyncClient, server: psutil.Process, folders: list[Path],
                 seed: int) -> None:  # fmt: skip
        self.http, self.server, self.folders, self.seed = http, server, folders, seed
        self.engines = [
            RolloutEngine.from_pretrained(folder, "none", num_threads=1) for folder in folders
        ]
        self.policies = {0: 0}  # by weight version
        self.version = 0
        self.counts, self.violations = Counter[str](), list[str]()
        self.may_send, self.num_inside = asyncio.Event(), 0
        self.memory_mib: list[int] = []
        self.undisturbed = asyncio.Lock()

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.violations.append(f"seed {self.seed}: {text}")
            print(f"VIOLATION {self.violations[-1]}", flush=True)

    async def run(self, seconds: float, num_clients: int) -> None:
        clients = [asyncio.create_task(self.client(f"client {k}")) for k in range(num_clients)]
        rng, clock = random.Random(f"{self.seed} changes"), asyncio.get_running_loop().time
        end, next_look = clock() + seconds, clock()
        while clock() < end and not any(client.done() for client in clients):
            if clock() >= next_look:
                await self.look()
                next_look = clock() + REST_SECONDS
            await asyncio.sleep(rng.uniform(0, 1.5))
            await self.change(rng)
        await self.look()
        for client in clients:
            client.cancel()
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                self.require(False, f"a client ended by {ended!r}")

    # Clients

    async def client(self, name: str) -> None:
        rng = random.Random(f"{self.seed} {name}")
        for number in range(10**9):
            await asyncio.sleep(rng.uniform(0, 0.25))
            prompt = [rng.randrange(3, 97) for _ in range(rng.randint(1, 24))]
            sampling = {
                "temperature": rng.choice([0.0, 0.7, 1.0]), "seed": rng.randrange(50),
                "max_new_tokens": rng.randint(1, 160), "ignore_eos": rng.random() < 0.7,
                **rng.choice([{}, {"top_p": 0.8, "top_k": 20}, {"repetition_penalty": 1.2}]),
            }  # fmt: skip
            rid, leaves = f"{name} {number}", rng.choice([None, None, "abort", "vanish"])
            await self.may_send.wait()
            self.num_inside += 1
            await self.one(rid, prompt, sampling, leaves, rng.uniform(0, 0.15))
            self.num_inside -= 1

    async def one(self, rid: str, prompt: list[int], sampling: dict[str, Any],
                  leaves: str | None, patience: float) -> None:  # fmt: skip
        body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling,
                "return_logprob": True}  # fmt: skip
        call = asyncio.ensure_future(self.http.post("/generate", json=body))
        if leaves and not (await asyncio.wait([call], timeout=patience))[0]:
            if leaves == "vanish":
                call.cancel()
                return
            await self.http.post("/abort_request", json={"rid": rid})
        answer = await call
        self.require(answer.status_code == 200, f"{rid}: {answer.status_code} {answer.text}")
        if answer.status_code == 200:
            await self.compare(rid, prompt, SamplingParams(**sampling), answer.json())

    async def compare(self, rid: str, prompt: list[int], params: SamplingParams,
                      answer: dict[str, Any]) -> None:  # fmt: skip
        meta, ids = answer["meta_info"], answer["output_ids"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        self.counts[f"finish {meta['finish_reason']['type']}"] += 1
        for span in meta["weight_versions"]:
            start, end = span["start"], span["end"]
            engine = self.engines[self.policies[int(span["version"])]]
            async with self.undisturbed:
                engine.submit(prompt, params, partial_ids=ids[:start])
                known = (await asyncio.to_thread(_drained, engine))[0]
            self.require(
                (ids[start:end], logprobs[start:end])
                == (known.token_ids[: end - start], known.logprobs[: end - start]),
                f"{rid}, version {span['version']}, tokens {start}:{end} of {prompt} {params}",
            )
            self.counts["tokens compared"] += end - start

    # Changes

    async def change(self, rng: random.Random) -> None:
        kinds = ["tensors", "disk", "torn", "pause", "sleep", "flush", "freeze"]
        kind = rng.choice(kinds)
        self.counts[kind] += 1
        if kind in ("tensors", "disk"):
            await self.update(rng.randrange(POLICIES), by_disk=kind == "disk")
        elif kind == "torn":
            first, *_ = sorted(load_file(self.folders[0] / "model.safetensors").items())
            await self.post("/begin_weight_update", {})
            await self.send(dict([first]), {})
            await self.post("/abandon_weight_update", {"reason": "the soak"})
            await self.update(rng.randrange(POLICIES), by_disk=True)
        elif kind == "pause":
            await self.post("/pause_generation", {"mode": rng.choice(["retract", "in_place"])})
            await asyncio.sleep(rng.uniform(0, 0.5))
            await self.post("/continue_generation", {})
        elif kind == "sleep":
            tags = rng.choice([["kv_cache"], ["weights"], ["kv_cache", "weights"]])
            await self.post("/release_memory_occupation", {"tags": tags})
            await asyncio.sleep(rng.uniform(0, 0.5))
            await self.post("/resume_memory_occupation", {"tags": tags})
        elif kind == "flush":  # refused where requests are in flight
            await self.http.post("/flush_cache")
        else:
            self.server.suspend()
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            self.server.resume()

    async def update(self, policy: int, *, by_disk: bool) -> None:
        version = max(self.policies) + 1
        self.policies[version] = policy
        if by_disk:
            body = {"model_path": self.folders[policy].name, "weight_version": version}
            await self.post("/update_weights_from_disk", body)
        else:
            tensors = load_file(self.folders[policy] / "model.safetensors")
            await self.send(tensors, {"weight_version": str(version)})
        self.version = version

    async def send(self, tensors: dict[str, torch.Tensor], query: dict[str, str]) -> None:
        answer = await self.http.post(
            "/update_weights_from_tensor", content=save(tensors), params=query,
            headers={"Content-Type": "application/octet-stream"},
        )  # fmt: skip
        self.require(answer.status_code == 200, f"update: {answer.status_code} {answer.text}")

    async def post(self, path: str, body: dict[str, Any]) -> None:
        answer = await self.http.post(path, json=body)
        self.require(answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}")

    # Rest

    async def look(self) -> None:
        """Let all requests end, look at the server, and let clients go on."""
        self.may_send.clear()
        load: dict[str, Any] = {}
        while self.num_inside or load.get("num_total_reqs") != 0:
            await asyncio.sleep(0.1)  # requests of clients that left end too
            load = (await self.http.get("/v1/loads")).json()["loads"][0]
        await self.post("/flush_cache", {})
        text = (await self.http.get("/metrics")).text
        self.require("specrollout_kv_slots_used 0" in text, "KV slots are used in rest")
        answer = await self.http.post("/weights_checker", json={"action": "checksum"})
        digest = self.engines[self.policies[self.version]].weights_digest()
        self.require(answer.json().get("per_engine_checksum") == digest, f"weights: {answer.text}")
        self.memory_mib.append(self.server.memory_info().rss >> 20)
        half = max(4, len(self.memory_mib) // 2)
        latest = self.memory_mib[half:][-3:]  # buffers come and go
        grown = min(latest, default=0) - max(self.memory_mib[:half])
        self.require(grown <= MAX_GROWTH_MIB, f"memory grew by {grown} MiB: {self.memory_mib}")
        self.may_send.set()


def _drained(engine: RolloutEngine) -> list[Any]:
    while not (ended := engine.step()):
        pass
    return ended


def save_policies(model: Path, root: Path) -> list[Path]:
    """A copy of the model, then copies with noise of a twentieth of its weights' deviation."""
    tensors = {k: v for file in model.glob("*.safetensors") for k, v in load_file(file).items()}
    folders = [root / f"policy{policy}" for policy in range(POLICIES)]
    for policy, folder in enumerate(folders):
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        generator = torch.Generator().manual_seed(policy)
        own = {
            name: tensor if policy == 0 or tensor.ndim < 2
            else (tensor + 0.05 * tensor.float().std() * torch.randn(
                tensor.shape, generator=generator)).to(tensor.dtype)
            for name, tensor in tensors.items()
        }  # fmt: skip
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    return folders


async def soaked(options: argparse.Namespace, root: Path) -> Soak:
    model = options.model or save_text_model(root / "model", max_positions=512)
    folders = save_policies(model, root)
    arguments = (*OPTIONS, f"server.weights_root={root}", f"spec={options.spec}")
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"  # more would hide a leak
    with served(folders[0], *arguments) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            soak = Soak(http, psutil.Process(process.pid), folders, options.seed)
            await soak.run(options.seconds, options.clients)
        process.send_signal(signal.SIGTERM)
        log, _ = await asyncio.to_thread(process.communicate)
    soak.require(process.returncode == 0, f"exit code {process.returncode}")
    soak.require("Traceback" not in log, log[log.find("Traceback") :][:3000])
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a model's folder; default: a tiny random one")
    parser.add_argument("--spec", default="ngram", help="of the server; default: %(default)s")
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="specrollout-soak-") as folder:
        soak = asyncio.run(soaked(options, Path(folder)))
    for what, times in sorted(soak.counts.items()):
        print(f"{times:8} {what}")
    print(f"seed {options.seed}: {len(soak.violations)} violations")
    return bool(soak.violations)


if __name__ == "__main__":
    sys.exit(main())
