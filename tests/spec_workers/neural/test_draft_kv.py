"""The slots of a draft's pool that belong to each request."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollout.errors import IntegrityError
from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.memory.kv_pool import KvPool
from spec_workers.neural.draft_kv import DraftKv
from tests.helpers.requests import make_request

SIZES = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2}
SPEC = SimpleNamespace(decoder=SimpleNamespace(**SIZES, latent=None))
PROMPT = [7, 8, 9, 10, 11, 12]
CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


class Running:
    """A request whose tokens a target and a draft have computed, without either's network."""

    def __init__(self, world: World, tokens: list[int]) -> None:
        self.world = world
        self.request = make_request(tokens)
        row, self.computed = world.memory.admit(np.array(tokens, dtype=np.int32), headroom=0)
        self.request.row = row

    def compute(self, end: int) -> None:
        """The target's part of a step."""
        world, row = self.world, self.request.row
        world.memory.extend(row, end)
        slots = world.memory.req_to_token.table[row, self.computed : end]
        world.target_pool.note_forward(slots)
        self.started, self.computed = self.computed, end
        self.request.computed_len = end

    def read(self, following: list[int]) -> None:
        """The draft's: ``following``, the tokens behind the positions it reads."""
        kv, row = self.world.kv, np.array([self.request.row])
        known = (self.request.tokens + following)[self.started + 1 :]
        windows = [known[i : i + kv.horizon] for i in range(len(known) - kv.horizon + 1)]
        kv.follow(row, np.array([self.started]), [self.request.tokens])
        lens = np.array([len(windows)])
        positions = np.arange(self.started, self.started + len(windows))
        slots = kv.slots_of(row, lens, positions)
        kv.append(row, lens, slots)
        kv.commit(row, lens, slots, np.array(windows, dtype=np.int32).reshape(-1, kv.horizon))

    def wait(self, positions: int) -> None:
        """The next `read` begins so many positions earlier: they have waited for their tokens."""
        self.started -= positions

    def step(self, token: int) -> None:
        """One token is run, read and emitted."""
        self.compute(len(self.request.tokens))
        self.read([token])
        self.request.tokens.append(token)

    def share(self) -> None:
        self.world.memory.share(self.request.row, self.request.tokens[: self.computed])

    def release(self) -> None:
        self.world.memory.release(self.request.row, self.request.tokens[: self.computed])
        self.request.row = -1

    @property
    def positions(self) -> list[int]:
        """The positions that the draft would attend to now."""
        world, row = self.world, self.request.row
        world.kv.follow(np.array([row]), np.array([self.computed]), [self.request.tokens])
        slots = world.memory.req_to_token.table[row, : self.computed].tolist()
        return [slots.index(slot) for slot in world.kv.table[row, : world.kv.lens_Q[row]].tolist()]


class World:
    def __init__(self, horizon: int = 1) -> None:
        self.memory = KVCacheManager(40, 4, 32, prefix_cache=True)
        self.target_pool = KvPool(num_slots=40, **SIZES, **CPU)
        self.kv = DraftKv(
            self.memory, self.target_pool, SPEC, num_scratch=6, horizon=horizon, **CPU
        )


@pytest.fixture
def world():
    return World()


def test_a_row_grows_with_its_request(world):
    one, other = Running(world, PROMPT), Running(world, [3, 4])
    for token in (20, 21, 22):
        one.step(token)
        other.step(token + 10)
    assert one.positions == list(range(8))
    assert other.positions == list(range(4))
    world.kv.check_integrity([one.request, other.request])
    assert world.kv.pool.num_slots == 46
    assert world.kv.first_scratch == 41
    one.compute(9)
    one.request.tokens += [23]
    one.step(24)  # without having read position 8
    assert one.positions == [*range(8), 9]
    world.kv.check_integrity([one.request, other.request])


def test_a_prefix_that_is_found_again_is_read_again(world):
    one = Running(world, PROMPT)
    one.step(20)
    one.step(21)
    one.release()
    same = Running(world, [*PROMPT, 20, 21])
    assert same.computed == 7
    assert same.positions == list(range(7))
    parted = Running(world, [*PROMPT, 20, 30])
    assert parted.computed == 7
    assert parted.positions == list(range(6))  # behind position 6 came 21
    parted.step(31)
    assert parted.positions == [*range(6), 7]
    world.kv.check_integrity([same.request, parted.request])


def test_siblings_part_behind_their_prompt(world):
    one, other = Running(world, PROMPT), Running(world, PROMPT)
    one.step(20)
    other.step(30)
    assert one.positions == other.positions == list(range(6))
    one.share()
    other.share()
    assert one.positions == list(range(6))
    assert other.positions == list(range(5))  # at the prompt's end the one's slot is shared
    one.step(21)
    other.step(31)
    assert one.positions == list(range(7))
    assert other.positions == [0, 1, 2, 3, 4, 6]
    world.kv.check_integrity([one.request, other.request])


def test_slots_that_the_target_wrote_since_belong_to_nobody(world):
    one = Running(world, PROMPT)
    one.step(20)
    one.release()
    world.memory.reset()
    again = Running(world, PROMPT)  # in the same slots, with the same next tokens
    again.compute(6)
    assert again.positions == []
    again.read([20])
    assert again.positions == list(range(6))


def test_with_a_horizon_of_two_the_last_position_waits():
    world = World(horizon=2)
    one = Running(world, PROMPT)
    one.step(20)
    assert one.positions == list(range(5))  # behind position 5 one token is known
    one.release()
    same = Running(world, [*PROMPT, 20, 21])
    assert same.positions == list(range(5))
    parted = Running(world, [*PROMPT[:5], 30, 31])
    assert parted.computed == 5
    assert parted.positions == [0, 1, 2]  # 3 has read [11, 12]
    short = Running(world, PROMPT[:5])
    assert short.positions == [0, 1, 2]


def test_positions_that_waited_are_written_where_siblings_cannot_see_them():
    """Position 5 of both waits for its second token; by then they share its slot."""
    world = World(horizon=2)
    one, other = Running(world, PROMPT), Running(world, PROMPT)
    for each, token in ((one, 20), (other, 30)):
        each.step(token)
        each.share()
    for each, token in ((one, 21), (other, 31)):
        each.compute(len(each.request.tokens))
        each.wait(1)
        each.read([token])
        each.request.tokens.append(token)
    kv = world.kv
    # Behind position 4 one's first token came, which the other has not.
    for each, positions in ((one, [0, 1, 2, 3, 4, 5]), (other, [0, 1, 2, 3, 5])):
        row = each.request.row
        assert kv.positions(row) == positions
        own = kv.table[row, len(positions) - 1]
        assert own != world.memory.req_to_token.table[row, 5]
        assert kv.first_private <= own < kv.first_scratch
    assert kv.table[one.request.row, 5] != kv.table[other.request.row, 4]
    kv.check_integrity([one.request, other.request])
    one.release()
    other.release()
    again = Running(world, [*PROMPT, 20, 21, 22])
    assert again.positions == [0, 1, 2, 3, 4]  # private slots are not kept


def test_integrity_is_checked_and_new_weights_forget_everything(world):
    one = Running(world, PROMPT)
    one.step(20)
    world.kv.table[one.request.row, 2] = 39
    with pytest.raises(IntegrityError, match="other slots"):
        world.kv.check_integrity([one.request])
    world.kv.forget()
    assert one.positions == []
    one.step(21)
    assert one.positions == [6]
    world.kv.check_integrity([one.request])
