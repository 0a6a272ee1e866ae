"""Who runs what: affinity, balance, and nothing lost, in simulations."""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict

import pytest

from rollout.cluster.router import Router

MAX_RUNNING = 8


def router_of(num_replicas: int, max_running: int = MAX_RUNNING) -> Router:
    router = Router(names := [f"replica-{i}" for i in range(num_replicas)])
    for name in names:
        router.join(name, max_running)
    return router


def group_key(index: int) -> int:
    return random.Random(index).getrandbits(63)


def add_groups(router: Router, num_groups: int, n: int, first_id: int = 0) -> dict[int, int]:
    """Group of each request, whose ids count up from ``first_id``."""
    groups = {}
    for index in range(num_groups * n):
        groups[first_id + index] = group_key(index // n)
        router.add(first_id + index, groups[first_id + index])
    return groups


class Simulation:
    """Requests of known lengths, all that a replica has at once beside each other."""

    def __init__(self, router: Router, lengths: dict[int, float]) -> None:
        self.router = router
        self.lengths = lengths
        self.now = 0.0
        self.where: dict[int, str] = {}
        self._ends: list[tuple[float, int]] = []

    def dispatch(self) -> None:
        for name, request_ids in self.router.take().items():
            for request_id in request_ids:
                assert request_id not in self.where, "given out twice"
                self.where[request_id] = name
                heapq.heappush(self._ends, (self.now + self.lengths[request_id], request_id))

    def run(self) -> float:
        self.dispatch()
        while self._ends:
            self.now, request_id = heapq.heappop(self._ends)
            assert self.router.remove(request_id) == self.where[request_id]
            self.dispatch()
        assert self.router.num_waiting == 0
        return self.now


def test_siblings_are_given_to_one_replica_while_it_has_seats():
    router = router_of(4, max_running=64)
    groups = add_groups(router, 20, 4)
    homes = defaultdict(set)
    for name, request_ids in router.take().items():
        for request_id in request_ids:
            homes[groups[request_id]].add(name)
    assert len(homes) == 20
    assert all(len(names) == 1 for names in homes.values())
    assert len({name for names in homes.values() for name in names}) == 4


def test_the_next_epoch_finds_each_group_where_it_was():
    router = router_of(4, max_running=1000)
    first = add_groups(router, 50, 2)
    homes = {first[i]: name for name, ids in router.take().items() for i in ids}
    for request_id in first:
        router.remove(request_id)
    second = add_groups(router, 50, 2, first_id=1000)
    assert {second[i]: name for name, ids in router.take().items() for i in ids} == homes


def test_the_groups_of_a_dead_replica_move_and_no_others():
    router = router_of(4, max_running=1000)
    groups = add_groups(router, 200, 1)
    before = {i: name for name, ids in router.take().items() for i in ids}
    lost = router.leave("replica-2")
    assert lost == [i for i in groups if before[i] == "replica-2"]
    for request_id in lost:
        router.add(request_id, groups[request_id], first=True)
    moved = {i: name for name, ids in router.take().items() for i in ids}
    assert sorted(moved) == lost
    assert set(moved.values()) == {"replica-0", "replica-1", "replica-3"}
    share = Counter(moved.values())
    assert max(share.values()) < 2.5 * min(share.values())
    router.join("replica-2", 1000)
    for request_id in groups:
        router.remove(request_id)
    add_groups(router, 200, 1, first_id=1000)
    after = {i - 1000: name for name, ids in router.take().items() for i in ids}
    assert after == before


@pytest.mark.parametrize("num_replicas", [2, 5, 16])
@pytest.mark.parametrize("seed", range(4))
def test_long_tails_are_balanced(num_replicas, seed):
    """Within a longest request of the time that perfect sharing takes."""
    rng = random.Random(seed)
    router = router_of(num_replicas)
    groups = add_groups(router, 40 * num_replicas, 4)
    scale = {group: rng.paretovariate(1.5) for group in set(groups.values())}
    lengths = {i: min(50.0, scale[groups[i]] * rng.uniform(0.5, 1.5)) for i in groups}
    simulation = Simulation(router, lengths)
    took = simulation.run()
    max_running = num_replicas * (MAX_RUNNING + MAX_RUNNING // 4)
    assert took <= sum(lengths.values()) / max_running + max(lengths.values())
    together = [len({simulation.where[i] for i in groups if groups[i] == group}) for group in scale]
    assert sum(count == 1 for count in together) > 0.7 * len(together)


def test_no_seat_is_idle_while_something_waits():
    router = router_of(3)
    router.add(0, 7)
    for request_id in range(1, 100):
        router.add(request_id, 7)  # one large group
    taken = router.take()
    assert sorted(map(len, taken.values())) == [
        MAX_RUNNING,
        MAX_RUNNING,
        MAX_RUNNING + MAX_RUNNING // 4,
    ]
    for _ in range(50):
        request_id = taken["replica-1"].pop()
        router.remove(request_id)
        for name, request_ids in router.take().items():
            taken[name] += request_ids
        assert len(taken["replica-1"]) >= MAX_RUNNING or router.num_waiting == 0


def test_the_same_calls_give_the_same_answers():
    def answers() -> list[dict[str, list[int]]]:
        rng = random.Random(3)
        router = router_of(3)
        add_groups(router, 30, 5)
        running: list[int] = []
        found = []
        for _ in range(100):
            taken = router.take()
            found.append(taken)
            running += [i for ids in taken.values() for i in ids]
            for _ in range(min(len(running), 3)):
                router.remove(running.pop(rng.randrange(len(running))))
        return found

    assert answers() == answers()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_or_given_twice_whatever_happens(seed):
    rng = random.Random(seed)
    names = [f"replica-{i}" for i in range(4)]
    router = Router(names)
    alive: set[str] = set()
    waiting: dict[int, int] = {}
    running: dict[int, str] = {}
    lonely: set[int] = set()
    groups: dict[int, int] = {}
    next_id = 0
    for _ in range(600):
        match rng.choice(["add", "add", "take", "take", "remove", "leave", "join"]):
            case "add":
                for _ in range(rng.randint(1, 4)):
                    groups[next_id] = rng.randrange(6)
                    is_lonely = rng.random() < 0.1
                    router.add(next_id, groups[next_id], first=rng.random() < 0.2, alone=is_lonely)
                    waiting[next_id] = groups[next_id]
                    if is_lonely:
                        lonely.add(next_id)
                    next_id += 1
            case "take":
                for name, request_ids in router.take().items():
                    assert name in alive
                    for request_id in request_ids:
                        del waiting[request_id]
                        running[request_id] = name
            case "remove" if groups.keys() & (waiting.keys() | running.keys()):
                request_id = rng.choice(sorted(waiting.keys() | running.keys()))
                assert router.remove(request_id) == running.pop(request_id, None)
                waiting.pop(request_id, None)
            case "leave":
                name = rng.choice(names)
                lost = router.leave(name)
                assert sorted(lost) == sorted(i for i, where in running.items() if where == name)
                alive.discard(name)
                for request_id in lost:
                    del running[request_id]
                    router.add(request_id, groups[request_id], alone=request_id in lonely)
                    waiting[request_id] = groups[request_id]
            case "join":
                if absent := sorted(set(names) - alive):
                    name = rng.choice(absent)
                    router.join(name, max_running=3)
                    alive.add(name)
        assert router.num_waiting == len(waiting)
        for request_id in lonely & running.keys():
            neighbours = [i for i, name in running.items() if name == running[request_id]]
            assert neighbours == [request_id]


def test_who_must_be_alone_waits_for_a_replica_to_run_empty_and_keeps_the_others_waiting():
    router = router_of(1)
    for request_id in range(3):
        router.add(request_id, request_id)
    router.take()
    router.add(100, 5, alone=True)
    router.add(101, 6, alone=True)
    router.add(102, 7)
    assert router.take() == {}
    for request_id in range(3):
        assert router.take() == {}
        router.remove(request_id)
    assert router.take() == {"replica-0": [100]}
    assert router.take() == {}
    router.remove(100)
    assert router.take() == {"replica-0": [101]}
    router.remove(101)
    assert router.take() == {"replica-0": [102]}
