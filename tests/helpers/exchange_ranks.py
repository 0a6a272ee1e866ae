"""One of three ranks that exchange tensors: ``python -m tests.helpers.exchange_ranks out.json``.

As `launch` starts it. Writes what each case gave, by name.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from rollout.errors import ParallelError
from rollout.parallel import ProcessRanks
from rollout.parallel import exchange as exchanges
from rollout.parallel.exchange import GroupExchange, HostExchange
from rollout.parallel.partition import consecutive
from rollout.parallel.rank_group import NO_MEMORY
from tests.helpers.hang import HANG_SECONDS

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LATE_SECONDS = 3.0
SLOT = exchanges.native.SLOT_BYTES
WIDTHS = [(5, 5, 5), (33, 33, 31), (1, 1, 0), (0, 4, 9)]
NOBODYS_MEMORY = (64, 1 << 30)  # as where weights were given back meanwhile
LARGE = [(1, (SLOT // 4 + 3, SLOT // 4 + 3, 7)), (3, (SLOT, 1, SLOT // 3)), (700, (513, 513, 511))]


class Ranks:
    """Groups of these ranks, each with keys of its own in the store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._opened = 0

    def store(self) -> dist.Store:
        self._opened += 1
        return PrefixStore(f"group {self._opened}", self._store)

    def group(self, timeout: float = HANG_SECONDS) -> ProcessRanks:
        return ProcessRanks(
            self.store(), RANK, SIZE, device=torch.device("cpu"), timeout=timeout
        )  # fmt: skip

    def gloo(self) -> GroupExchange:
        return GroupExchange(dist.ProcessGroupGloo(self.store(), RANK, SIZE))


def random_bits(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all, NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    shape_of_bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(256, shape_of_bytes, generator=generator, dtype=torch.uint8).view(dtype)


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    same_kind = found.shape == wanted.shape and found.dtype is wanted.dtype
    return same_kind and torch.equal(
        found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


def differing(ranks: Ranks) -> list[str]:
    """The exchanges in which shared memory, gloo and what was sent are not alike."""
    group, gloo = ranks.group(), ranks.gloo()
    host = group._exchanges[0]
    found = [] if isinstance(host, HostExchange) else ["no memory is shared"]
    sizes = [(rows, widths) for rows in (0, 1, 2, 17) for widths in WIDTHS] + LARGE
    for dtype in (torch.float32, torch.bfloat16):
        for seed, (rows, widths) in enumerate(sizes):
            parts = consecutive(widths)
            sent_TC = random_bits(rows, sum(widths), dtype=dtype, seed=seed)
            own_TC = sent_TC[:, parts[RANK].start : parts[RANK].stop]  # its rows are not adjacent
            found += [
                f"{type(exchange).__name__} {dtype} {rows} {widths} {ahead}"
                for exchange in (host, gloo)
                for ahead in (NO_MEMORY, (sent_TC.data_ptr(), sent_TC.nbytes), NOBODYS_MEMORY)
                if not same_bits(exchange.all_gather_columns(own_TC, parts, ahead), sent_TC)
            ]
        for size in (0, 1, 3, SLOT + 5):
            sent = random_bits(size, dtype=dtype, seed=size)
            for exchange in (host, gloo):
                got = sent.clone() if RANK == 0 else torch.zeros_like(sent)
                exchange.broadcast(got)
                if not same_bits(got, sent):
                    found.append(f"{type(exchange).__name__} {dtype} {size} sent to all")
    for texts in (["", "ä" * 7, "x"], ["", "", ""], ["long" * SLOT, "", "y"]):
        if group.all_gather_text(texts[RANK]) != texts:
            found.append("texts")
        if group.broadcast_bytes(texts[RANK].encode()) != texts[0].encode():
            found.append("what rank 0 told")
    return found


def mixed_up(ranks: Ranks) -> int:
    """Exchanges that gave another one's numbers, of many in which now and then a rank is late."""
    group, wrong = ranks.group(), 0
    same, own = random.Random(1), random.Random(RANK)
    for number in range(3000):
        if own.random() < 0.02:
            time.sleep(0.0005)
        if same.random() < 0.5:
            wrong += group.all_gather_int(number * SIZE + RANK) != [
                number * SIZE + rank for rank in range(SIZE)
            ]
        else:
            wrong += group.broadcast_floats([number if RANK == 0 else -1.0]) != [number]
    return wrong


def by_gloo(ranks: Ranks, name: str, replacement: object) -> list[object]:
    """The kind of exchange where an attribute is replaced on rank 1, and what it gathers."""
    with mock.patch.object(exchanges, name, replacement) if RANK == 1 else nullcontext():
        group = ranks.group()
    return [type(group._exchanges[0]).__name__, group.all_gather_int(RANK)]


def fails(*_: object) -> None:
    raise RuntimeError("not allowed")


class Unable:
    """The compiled module of a process that cannot open another one's memory."""

    class Exchange:
        open = staticmethod(fails)


def errors_of(group: ProcessRanks) -> list[str]:
    found = []
    for _ in range(2):
        try:
            group.all_gather_int(RANK)
        except ParallelError as error:
            found.append(str(error))
    return found


def main(output: Path) -> None:
    torch.set_num_threads(1)
    store, _, _ = next(iter(rendezvous("env://")))
    ranks = Ranks(store)
    results: dict[str, object] = {"differing": differing(ranks), "mixed up": mixed_up(ranks)}
    results["other hosts"] = by_gloo(ranks, "this_host", lambda: "another host")
    results["not allowed"] = by_gloo(ranks, "native", Unable)

    ranks.group().all_gather_int(RANK)  # the next one's timeout limits its connecting, too
    group = ranks.group(LATE_SECONDS)
    if RANK != 2:
        results["late"] = errors_of(group)
        store.set(f"was late {RANK}", "")
    store.wait(["was late 0", "was late 1"])

    group = ranks.group()
    if RANK == 1:
        group.close("it had enough")
    results["left"] = errors_of(group)
    group = ranks.group()
    if RANK != 1:
        results["ended"] = errors_of(group)
    output.write_text(json.dumps(results))
    if RANK:
        os._exit(0)
    del store  # its host hosts it as long as this


if __name__ == "__main__":
    main(Path(sys.argv[1]))
