"""Disturbs one server and one dataset job at random, and compares them with undisturbed ones.

    python -m tests.soak --seconds 3600 --seed 1 [--model FOLDER] [--spec ngram]

Prints what was done and every violation with its seed and event; exit code 1 where there was one,
and the folder with all logs is kept then. The seed decides which events come in which order within
each stream of them, not the moments at which they meet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import traceback
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.server_bench.crowd import send_all
from benchmarks.server_bench.malformed import malformed
from tests.helpers.text_model import save_text_model
from tests.soak.asks import draw_asks
from tests.soak.changes import Changes
from tests.soak.clients import Client
from tests.soak.corpora import Corpora
from tests.soak.gate import Gate
from tests.soak.job import Job, Row
from tests.soak.ledger import Ledger
from tests.soak.policies import History, save_policies
from tests.soak.reference import Checker, References
from tests.soak.rest import Rest
from tests.soak.server_process import ServerProcess

TIMEOUT = 300.0  # seconds without an answer that count as none
REST_EVERY = 15.0  # seconds between two looks at the server in rest
POLICIES = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is generated, by the size of the model."""

    asks: int
    tokens: int  # of a rollout of the server, at most; a third as many of one of the job
    prompts: int  # of the job
    kv_tokens: int  # so few that requests are preempted


TINY = Scale(asks=96, tokens=160, prompts=100, kv_tokens=640)
LARGE = Scale(asks=24, tokens=24, prompts=12, kv_tokens=640)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a model's folder (default: a tiny random one)")
    parser.add_argument("--spec", default="ngram", help="of the server (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="specrollout-soak-"))
    ledger = Ledger(options.seed, folder / "events.log")
    code = 0
    try:
        asyncio.run(_interruptible(Soak(options, folder, ledger)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    except Exception:  # the server is gone, or the soak itself is wrong: the table is printed
        ledger.require(False, ledger.begin("rest", "cut short"), traceback.format_exc())
    finally:
        ledger.print(Console())
        ledger.close()
        if ledger.violations:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder)
    return 1 if ledger.violations else code


async def _interruptible(soak: Soak) -> None:
    """SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await soak.run()


class Soak:
    """All streams of events, until the time is over."""

    def __init__(self, options: argparse.Namespace, folder: Path, ledger: Ledger) -> None:
        self._options, self._folder, self._ledger = options, folder, ledger
        self._gate, self._history = Gate(), History()
        self._exclusive = asyncio.Lock()

    def _rng(self, stream: str) -> random.Random:
        return random.Random(f"{self._options.seed} {stream}")

    async def run(self) -> None:
        root = self._folder / "root"
        model = self._options.model or save_text_model(self._folder / "model", max_positions=512)
        folders = save_policies(model, root, POLICIES)
        with ExitStack() as at_end:
            references = References(folders)
            at_end.callback(references.close)
            job = Job(self._rng("job"), self._job_arguments(folders[0]), self._folder, self._ledger)
            at_end.callback(job.kill)
            expected = await job.undisturbed()
            server = ServerProcess(self._server_arguments(folders[0], root), self._folder)
            at_end.callback(server.kill)
            await server.wait_until_ready()
            async with httpx.AsyncClient(
                base_url=server.url,
                timeout=TIMEOUT,
                limits=httpx.Limits(max_keepalive_connections=0),
            ) as http:
                await self._disturb(server, http, references, root, folders, job, expected)
            await self._end(server)
        self._read_logs([server.log, *job.logs])

    async def _disturb(
        self,
        server: ServerProcess,
        http: httpx.AsyncClient,
        references: References,
        root: Path,
        folders: list[Path],
        job: Job,
        expected: list[Row],
    ) -> None:
        seed, ledger, history, gate = self._options.seed, self._ledger, self._history, self._gate
        asks = draw_asks(seed, self._scale.asks, references.vocab_size, self._scale.tokens)
        checker = Checker(ledger, history, references)
        names = [f"client{index}" for index in range(self._options.clients)]
        clients = [
            Client(name, self._rng(name), asks, http, server.port, gate, ledger, history, checker)
            for name in names
        ]
        corpora = Corpora(self._rng("corpora"), root, references.vocab_size, http, gate, ledger)
        changes = Changes(
            self._rng("changes"), folders, http, server, ledger, history, self._exclusive
        )
        rest = Rest(server, http, ledger, history, references)
        async with asyncio.TaskGroup() as streams:
            runs = [client.run() for client in clients]
            runs += [corpora.run(), self._send_malformed(server.port), self._watch(server)]
            tasks = [streams.create_task(run) for run in [*runs, job.run(expected)]]
            await self._change(changes, rest)
            async with gate.closed():
                await rest.look()
                await rest.sum_up()
                for task in tasks:
                    task.cancel()

    async def _change(self, changes: Changes, rest: Rest) -> None:
        """Change after change until the time is over, and now and then a look in rest."""
        rng, clock = self._rng("pace"), asyncio.get_running_loop().time
        deadline, next_look = clock() + self._options.seconds, clock()
        while clock() < deadline:
            if clock() >= next_look:
                async with self._gate.closed():
                    await rest.look()
                next_look = clock() + REST_EVERY
            await asyncio.sleep(rng.uniform(0, 1.5))
            await changes.one()

    async def _send_malformed(self, port: int) -> None:
        """Every kind of request that no client should send, several at once."""
        rng = self._rng("malformed")
        while True:
            await asyncio.sleep(rng.uniform(1, 5))
            crowd = malformed(25, rng.randrange(2**32))
            async with self._gate.passed(), self._exclusive:
                event = self._ledger.begin("malformed", "crowd of 25")
                for outcome in await send_all(port, crowd, num_clients=4, timeout=TIMEOUT):
                    self._ledger.count("malformed", f"status {outcome.status or 'none'}")
                    self._ledger.require(
                        not outcome.trouble, event, f"{outcome.trouble}: {outcome.request}"
                    )

    async def _watch(self, server: ServerProcess) -> None:
        while server.is_alive:
            await asyncio.sleep(0.5)
        raise RuntimeError(f"the server ended with {server.process.returncode}")

    async def _end(self, server: ServerProcess) -> None:
        event = self._ledger.begin("rest", "end by SIGTERM")
        server.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                while server.is_alive:
                    await asyncio.sleep(0.05)
        code = server.process.returncode
        self._ledger.require(code == 0, event, f"exit code {code}")

    def _read_logs(self, logs: list[Path]) -> None:
        event = self._ledger.begin("rest", "read logs")
        for log in logs:
            text = log.read_text(errors="replace")
            at = text.find("Traceback (most recent call last)")
            self._ledger.require(at < 0, event, f"{log.name}: {text[at : at + 3000]}")

    @property
    def _scale(self) -> Scale:
        return TINY if self._options.model is None else LARGE

    def _server_arguments(self, model: Path, root: Path) -> list[str]:
        return [
            f"model.path={model}", "model.max_context_len=512", "num_threads=1",
            f"memory.max_kv_tokens={self._scale.kv_tokens}", "scheduler.max_running=8",
            "scheduler.max_step_tokens=64", "scheduler.chunk_len=16",
            f"spec={self._options.spec}", "spec.calibration_seconds=0", "spec.corpus_bytes=1048576",
            f"server.weights_root={root}", f"server.corpora_root={root}", "server.model_name=m",
        ]  # fmt: skip

    def _job_arguments(self, model: Path) -> list[str]:
        data, rng = self._folder / "prompts.jsonl", self._rng("prompts")
        rows = [{"prompt": [rng.randrange(3, 97) for _ in range(1 + index % 9)], "id": index}
                for index in range(self._scale.prompts)]  # fmt: skip
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [
            f"model.path={model}", f"data.path={data}", "num_threads=1", "sampling.n=4",
            "sampling.temperature=0.9", f"sampling.max_new_tokens={self._scale.tokens // 3}",
            "memory.max_kv_tokens=1024", "scheduler.max_running=8",
            "scheduler.max_step_tokens=64", "scheduler.chunk_len=16",
        ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
