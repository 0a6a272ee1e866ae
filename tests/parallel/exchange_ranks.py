"""One of three ranks that exchange tensors, as `launch` starts it. Raises where a check fails."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
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


def shared_memory_and_gloo_give_what_was_sent(ranks: Ranks) -> None:
    group, gloo = ranks.group(), ranks.gloo()
    host = group._exchanges[0]
    assert isinstance(host, HostExchange)
    sizes = [(rows, widths) for rows in (0, 1, 2, 17) for widths in WIDTHS] + LARGE
    for dtype, exchange in itertools.product((torch.float32, torch.bfloat16), (host, gloo)):
        for seed, (rows, widths) in enumerate(sizes):
            parts = consecutive(widths)
            sent_TC = random_bits(rows, sum(widths), dtype=dtype, seed=seed)
            own_TC = sent_TC[:, parts[RANK].start : parts[RANK].stop]  # its rows are not adjacent
            for ahead in (NO_MEMORY, (sent_TC.data_ptr(), sent_TC.nbytes), NOBODYS_MEMORY):
                found = exchange.all_gather_columns(own_TC, parts, ahead)
                assert same_bits(found, sent_TC), (exchange, dtype, rows, widths, ahead)
        for size in (0, 1, 3, SLOT + 5):
            sent = random_bits(size, dtype=dtype, seed=size)
            got = sent.clone() if RANK == 0 else torch.zeros_like(sent)
            exchange.broadcast(got)
            assert same_bits(got, sent), (exchange, dtype, size)
    for texts in (["", "ä" * 7, "x"], ["", "", ""], ["long" * SLOT, "", "y"]):
        assert group.all_gather_text(texts[RANK]) == texts
        assert group.broadcast_bytes(texts[RANK].encode()) == texts[0].encode()


def no_exchange_gives_the_numbers_of_another(ranks: Ranks) -> None:
    """Now and then a rank is late."""
    group = ranks.group()
    same, own = random.Random(1), random.Random(RANK)
    for number in range(3000):
        if own.random() < 0.02:
            time.sleep(0.0005)
        if same.random() < 0.5:
            wanted = [number * SIZE + rank for rank in range(SIZE)]
            assert group.all_gather_int(wanted[RANK]) == wanted
        else:
            assert group.broadcast_floats([number if RANK == 0 else -1.0]) == [number]


def where_one_rank_cannot_share_memory_all_use_gloo(ranks: Ranks) -> None:
    elsewhere = mock.patch.object(exchanges, "this_host", return_value="another host")
    with elsewhere if RANK == 1 else nullcontext():
        group = ranks.group()
    assert isinstance(group._exchanges[0], GroupExchange)
    assert group.all_gather_int(RANK) == [0, 1, 2]


def fails_with(group: ProcessRanks, reason: str) -> None:
    for _ in range(2):
        with pytest.raises(ParallelError, match=f"^rank {RANK} of 3: {reason}.*; end all"):
            group.all_gather_int(RANK)


def a_rank_that_hangs_is_named_within_the_timeout(ranks: Ranks, store: dist.Store) -> None:
    ranks.group().all_gather_int(RANK)  # the next one's timeout limits its connecting, too
    group = ranks.group(LATE_SECONDS)
    if RANK != 2:
        fails_with(group, "rank 2 did not come in 3 seconds")
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
        fails_with(group, "rank . has ended or left" if RANK else gone)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store, _, _ = next(iter(rendezvous("env://")))
    ranks = Ranks(store)
    shared_memory_and_gloo_give_what_was_sent(ranks)
    no_exchange_gives_the_numbers_of_another(ranks)
    where_one_rank_cannot_share_memory_all_use_gloo(ranks)
    a_rank_that_hangs_is_named_within_the_timeout(ranks, store)
    a_rank_that_is_gone_is_named_at_once(ranks)
    Path(sys.argv[1]).write_text("null")
    if RANK:
        os._exit(0)
    del store  # its host hosts it as long as this
