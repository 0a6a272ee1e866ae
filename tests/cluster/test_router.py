"""The router keeps groups together and replicas busy, and loses nothing, in simulations."""

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


def homes_of(router: Router, groups: dict[int, int]) -> dict[int, str]:
    """The replica of each group that is handed out now; siblings have one."""
    homes: dict[int, set[str]] = defaultdict(set)
    for name, request_ids in router.take().items():
        for request_id in request_ids:
            homes[groups[request_id]].add(name)
    return {group: name for group, (name,) in homes.items()}


def test_a_group_is_given_to_one_replica_in_each_epoch():
    router = router_of(4, max_running=1000)
    first = add_groups(router, 50, 4)
    homes = homes_of(router, first)
    assert len(homes) == 50
    assert len(set(homes.values())) == 4
    for request_id in first:
        router.remove(request_id)
    assert homes_of(router, add_groups(router, 50, 4, first_id=1000)) == homes


def test_the_groups_of_a_dead_replica_move_and_no_others():
    router = router_of(4, max_running=1000)
    groups = add_groups(router, 200, 1)
    before = homes_of(router, groups)
    lost = router.leave("replica-2")
    assert lost == [i for i in groups if before[groups[i]] == "replica-2"]
    for request_id in lost:
        router.add(request_id, groups[request_id], first=True)
    moved = homes_of(router, groups)
    assert sorted(moved) == sorted(groups[i] for i in lost)
    share = Counter(moved.values())
    assert share.keys() == {"replica-0", "replica-1", "replica-3"}
    assert max(share.values()) < 2.5 * min(share.values())
    router.join("replica-2", 1000)
    for request_id in groups:
        router.remove(request_id)
    assert homes_of(router, add_groups(router, 200, 1, first_id=1000)) == before


@pytest.mark.parametrize("num_replicas", [2, 5, 16])
def test_long_tails_are_balanced(num_replicas):
    """Within a longest request of the time that perfect sharing takes."""
    for seed in range(4):
        rng = random.Random(seed)
        router = router_of(num_replicas)
        groups = add_groups(router, 40 * num_replicas, 4)
        scale = {group: rng.paretovariate(1.5) for group in set(groups.values())}
        lengths = {i: min(50.0, scale[groups[i]] * rng.uniform(0.5, 1.5)) for i in groups}
        where: dict[int, str] = {}
        ends: list[tuple[float, int]] = []
        now, homes = 0.0, defaultdict(set)
        while len(where) < len(groups) or ends:
            for name, request_ids in router.take().items():
                for request_id in request_ids:
                    assert request_id not in where, "given out twice"
                    where[request_id] = name
                    homes[groups[request_id]].add(name)
                    heapq.heappush(ends, (now + lengths[request_id], request_id))
            now, request_id = heapq.heappop(ends)
            assert router.remove(request_id) == where[request_id]
        assert router.num_waiting == 0
        max_running = num_replicas * (MAX_RUNNING + MAX_RUNNING // 4)
        assert now <= sum(lengths.values()) / max_running + max(lengths.values())
        assert sum(len(names) == 1 for names in homes.values()) > 0.7 * len(homes)


def test_no_seat_is_idle_while_something_waits():
    router = router_of(3)
    for request_id in range(100):
        router.add(request_id, 7)  # one large group
    taken = router.take()
    assert sorted(map(len, taken.values())) == [MAX_RUNNING, MAX_RUNNING, MAX_RUNNING * 5 // 4]
    for _ in range(50):
        request_id = taken["replica-1"].pop()
        router.remove(request_id)
        for name, request_ids in router.take().items():
            taken[name] += request_ids
        assert len(taken["replica-1"]) >= MAX_RUNNING or router.num_waiting == 0


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_or_given_twice_whatever_happens(seed):
    rng = random.Random(seed)
    names = [f"replica-{i}" for i in range(4)]
    router = Router(names)
    alive: set[str] = set()
    waiting: set[int] = set()
    running: dict[int, str] = {}
    lonely: set[int] = set()
    groups: dict[int, int] = {}
    for _ in range(600):
        match rng.choice(["add", "add", "take", "take", "remove", "leave", "join"]):
            case "add":
                for _ in range(rng.randint(1, 4)):
                    new = len(groups)
                    groups[new] = rng.randrange(6)
                    if rng.random() < 0.1:
                        lonely.add(new)
                    router.add(new, groups[new], first=rng.random() < 0.2, alone=new in lonely)
                    waiting.add(new)
            case "take":
                for name, request_ids in router.take().items():
                    assert name in alive
                    for request_id in request_ids:
                        waiting.remove(request_id)
                        running[request_id] = name
            case "remove" if waiting or running:
                request_id = rng.choice(sorted(waiting | running.keys()))
                assert router.remove(request_id) == running.pop(request_id, None)
                waiting.discard(request_id)
            case "leave":
                name = rng.choice(names)
                lost = router.leave(name)
                assert sorted(lost) == sorted(i for i, where in running.items() if where == name)
                alive.discard(name)
                for request_id in lost:
                    del running[request_id]
                    router.add(request_id, groups[request_id], alone=request_id in lonely)
                    waiting.add(request_id)
            case "join":
                if absent := sorted(set(names) - alive):
                    name = rng.choice(absent)
                    router.join(name, max_running=3)
                    alive.add(name)
        assert router.num_waiting == len(waiting)
        for request_id in lonely & running.keys():
            neighbours = [i for i, name in running.items() if name == running[request_id]]
            assert neighbours == [request_id]
