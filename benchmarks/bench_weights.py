"""Weight updates by every transport, beside a plain copy_ of the same bytes.

    python benchmarks/bench_weights.py [--threads 1] [--rounds 7] [--json FILE]

A figure is a whole update, checks and commit included, of an engine that has run before; the median
of rounds in which all of them take turns. Senders of shared memory and gloo are processes of their
own. Peak extra memory is what either end holds beyond its weights, sampled in updates of their own.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from table import Row, finish, parser, row
from weight_sender import HeldWeights

from rollout import RolloutEngine, SamplingParams
from rollout.weights.bucket import CACHED_BUCKET_BYTES, DEFAULT_BUCKET_BYTES, buckets

MIB = 2**20
BUCKET_BYTES = (CACHED_BUCKET_BYTES, 16 * MIB, DEFAULT_BUCKET_BYTES)
SLACK = 8 * MIB  # what the allocator and Python do with a few hundred names
BARS = {  # of the speed of copy_
    "in process": 0.7,
    f"shared memory, {CACHED_BUCKET_BYTES // MIB} MiB buckets": 0.4,
}

Update = Callable[[], None]


class Sender:
    """A process of weight_sender.py."""

    def __init__(self, what: str, options: Any, bucket_bytes: int, port: int = 0) -> None:
        script = Path(__file__).with_name("weight_sender.py")
        arguments = [what, options.model, options.threads, bucket_bytes, port]
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self, what: str) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())[what]

    def handles(self) -> Iterator[dict[str, Any]]:
        """Each is asked for while the one before is read: the sender has two segments."""
        self.ask()
        while (handle := self.hear("handle")) is not None:
            self.ask()
            yield handle

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


class Held:
    """Anonymous and shared memory that processes hold beyond what they did, sampled meanwhile.

    Pages the engine maps of a sender's segment are the sender's.
    """

    def __init__(self, sender: Sender | None) -> None:
        self._files: list[tuple[Path, tuple[str, ...]]] = [
            (Path("/proc/self/status"), ("RssAnon",))
        ]
        if sender is not None:
            of_sender = Path(f"/proc/{sender.process.pid}/status")
            self._files.append((of_sender, ("RssAnon", "RssShmem")))
        self._before = [self._bytes(index) for index in range(len(self._files))]
        self._peak = [0] * len(self._files)
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _bytes(self, index: int) -> int:
        file, fields = self._files[index]
        lines = (line.split() for line in file.read_text().splitlines())
        return sum(int(line[1]) * 1024 for line in lines if line[0].rstrip(":") in fields)

    def _sample(self) -> None:
        while not self._is_done.wait(0.001):
            for index, before in enumerate(self._before):
                self._peak[index] = max(self._peak[index], self._bytes(index) - before)

    def __enter__(self) -> Held:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()

    @property
    def most(self) -> int:
        """Of one process: what a trainer's host or an engine's must have to spare."""
        return max(self._peak)


def in_process(engine: RolloutEngine, weights: HeldWeights, options: Any) -> dict[str, Update]:
    pairs = list(weights)
    return {
        "in process": lambda: engine.update_weights_from_tensor(pairs),
        "generator": lambda: engine.update_weights_from_tensor(pair for pair in pairs),
        "disk": lambda: engine.update_weights_from_disk(options.model),
    }


def in_buckets(
    engine: RolloutEngine, weights: HeldWeights, options: Any, stack: ExitStack, bucket_bytes: int
) -> tuple[dict[str, Update], dict[str, Sender]]:
    """The transports that pack buckets, and the processes that send."""
    sharing = stack.enter_context(Sender("share", options, bucket_bytes))
    port = free_port()
    sending = stack.enter_context(Sender("send", options, bucket_bytes, port))
    assert sharing.hear("num_bytes") == sending.hear("num_bytes") == weights.num_bytes
    engine.init_weights_update_group("127.0.0.1", port, 1, 2, "bench", timeout=120)
    stack.callback(engine.destroy_weights_update_group, "bench")
    call = sending.hear("arguments")

    def flattened() -> None:
        stream = buckets(weights, bucket_bytes)
        engine.update_weights_from_tensor(stream, load_format="flattened_bucket")

    def shared() -> None:
        engine.update_weights_from_ipc(sharing.handles())

    def distributed() -> None:
        sending.ask()
        engine.update_weights_from_distributed(**call)

    calls = {"flattened bucket": flattened, "shared memory": shared, "gloo": distributed}
    return calls, {"shared memory": sharing, "gloo": sending}


def plain_copy(weights: HeldWeights) -> Update:
    copies = {name: torch.empty_like(tensor) for name, tensor in weights}

    def copy() -> None:
        for name, tensor in weights:
            copies[name].copy_(tensor)

    return copy


def in_turns(calls: dict[str, Update], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one that warms it."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: median(each) for name, each in seconds.items()}


def speeds(
    calls: dict[str, Update], copy: Update, num_bytes: int, rounds: int, suffix: str
) -> Iterator[Row]:
    seconds = in_turns({"copy_": copy, **calls}, rounds)
    yield row(f"copy_{suffix}", num_bytes / seconds["copy_"] / 1e9, "GB/s")
    for name in calls:
        yield row(f"{name}{suffix}", num_bytes / seconds[name] / 1e9, "GB/s")
        yield row(
            f"{name}{suffix} / copy_",
            seconds["copy_"] / seconds[name],
            "ratio",
            BARS.get(name + suffix),
        )


def memory(
    calls: dict[str, Update], senders: dict[str, Sender], allowed: int, suffix: str
) -> Iterator[Row]:
    """First updates, before any buffer is held."""
    for name, call in calls.items():
        with Held(senders.get(name)) as held:
            call()
        most = held.most / MIB
        yield row(f"{name}{suffix}, peak extra memory", most, "MiB", allowed / MIB, at_most=True)


def measure(options: Any) -> Iterator[Row]:
    weights = HeldWeights(options.model)
    engine = RolloutEngine.from_pretrained(options.model, spec="none", dtype="bfloat16")
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
    engine.update_weights_from_tensor(weights)
    copy, num_bytes = plain_copy(weights), weights.num_bytes
    largest = max(spec.num_bytes for spec in weights.manifest().values())
    calls = in_process(engine, weights, options)
    yield from memory(calls, {}, SLACK, "")
    yield from speeds(calls, copy, num_bytes, options.rounds, "")
    for bucket_bytes in BUCKET_BYTES:
        suffix = f", {bucket_bytes // MIB} MiB buckets"
        with ExitStack() as stack:
            calls, senders = in_buckets(engine, weights, options, stack, bucket_bytes)
            # A tensor larger than one of the two segments makes that one grow.
            allowed = max(bucket_bytes, largest + bucket_bytes // 2) + SLACK
            yield from memory(calls, senders, allowed, suffix)
            yield from speeds(calls, copy, num_bytes, options.rounds, suffix)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    arguments.add_argument(
        "--threads", type=int, default=1, help="of each process, sender and engine"
    )
    arguments.add_argument("--rounds", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    rows = list(measure(options))
    finish(f"weight updates, {options.threads} threads per process", rows, options.json)


if __name__ == "__main__":
    main()
