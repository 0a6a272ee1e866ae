"""One of three ranks that exchange tensors, as `launch` starts it. Raises where a check fails."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from rollout.errors import ParallelError
from rollout.parallel import ProcessRanks
from rollout.parallel.partition import consecutive
from tests.helpers.hang import HANG_SECONDS

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LATE_SECONDS = 3.0
WIDTHS = [(5, 5, 5), (33, 33, 31), (1, 1, 0), (0, 4, 9)]
LARGE = [(1, (40_003, 40_003, 7)), (3, (50_000, 1, 7_000)), (700, (513, 513, 511))]


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


def ranks_get_what_was_sent(ranks: Ranks) -> None:
    group = ranks.group()
    sizes = [(rows, widths) for rows in (0, 1, 2, 17) for widths in WIDTHS] + LARGE
    for dtype in (torch.float32, torch.bfloat16):
        for seed, (rows, widths) in enumerate(sizes):
            parts = consecutive(widths)
            sent_TC = random_bits(rows, sum(widths), dtype=dtype, seed=seed)
            own_TC = sent_TC[:, parts[RANK].start : parts[RANK].stop]  # its rows are not adjacent
            assert same_bits(group.all_gather_columns(own_TC, parts), sent_TC), (rows, widths)
    for dtype, width in ((torch.bfloat16, 7), (torch.float32, 5), (torch.uint8, 3)):
        whole_TC = random_bits(13, width, dtype=dtype, seed=1)
        own_TC = torch.zeros_like(whole_TC)
        own_TC[RANK::SIZE] = whole_TC[RANK::SIZE]
        assert same_bits(group.sum_disjoint(own_TC), whole_TC), dtype
    assert not group.sum_disjoint(torch.empty(0, 4)).numel()
    for texts in (["", "ä" * 7, "x"], ["", "", ""], ["long" * 10_000, "", "y"]):
        assert group.all_gather_text(texts[RANK]) == texts
        assert group.broadcast_bytes(texts[RANK].encode()) == texts[0].encode()


def no_exchange_gives_the_numbers_of_another(ranks: Ranks) -> None:
    """Now and then a rank is late."""
    group = ranks.group()
    same, own = random.Random(1), random.Random(RANK)
    for number in range(1000):
        if own.random() < 0.02:
            time.sleep(0.0005)
        if same.random() < 0.5:
            wanted = [number * SIZE + rank for rank in range(SIZE)]
            assert group.all_gather_int(wanted[RANK]) == wanted
        else:
            told = torch.tensor([number if RANK == 0 else -1])
            assert group.broadcast(told).tolist() == [number]


def fails_with(group: ProcessRanks, reason: str) -> None:
    for _ in range(2):
        with pytest.raises(ParallelError, match=f"^rank {RANK} of 3: {reason}.*; end all"):
            group.all_gather_int(RANK)


def a_rank_that_hangs_is_named_within_the_timeout(ranks: Ranks, store: dist.Store) -> None:
    ranks.group().all_gather_int(RANK)  # the next one's timeout limits its connecting, too
    group = ranks.group(LATE_SECONDS)
    if RANK != 2:
        log = Queue[logging.LogRecord]()
        logging.getLogger("rollout.parallel.rank_watch").addHandler(QueueHandler(log))
        fails_with(group, "rank 2 did not come in 3 seconds")
        named = log.get(timeout=HANG_SECONDS).getMessage()
        assert named.startswith(f"rank {RANK} waits for rank 2 (process "), named
        store.set(f"was late {RANK}", "")
    store.wait(["was late 0", "was late 1"])


def a_rank_that_is_gone_is_named_at_once(ranks: Ranks) -> None:
    """The last check: rank 1 ends."""
    group, gone = ranks.group(), "rank 1 has ended or left"
    if RANK == 1:
        group.close("it had enough")
    else:  # rank 0 leaves, too, once it has failed
        fails_with(group, "rank . has ended or left" if RANK else f"{gone}: it had enough")
    group = ranks.group()
    if RANK != 1:
        fails_with(group, "rank ..* has ended or left" if RANK else gone)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store, _, _ = next(iter(rendezvous("env://")))
    ranks = Ranks(store)
    ranks_get_what_was_sent(ranks)
    no_exchange_gives_the_numbers_of_another(ranks)
    a_rank_that_hangs_is_named_within_the_timeout(ranks, store)
    a_rank_that_is_gone_is_named_at_once(ranks)
    Path(sys.argv[1]).write_text("null")
    if RANK:
        os._exit(0)
    del store  # its host hosts it as long as this
