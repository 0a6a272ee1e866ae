"""The router chooses the replica that runs each request.

Requests queue here, by the replica that is their group's home, and are handed out as there is
room, so that little is lost when a replica dies and nothing waits at one while another idles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollout.sampling.seeds import split_mix


@dataclass(slots=True, eq=False)
class _ReplicaQueue:
    """A replica that takes requests."""

    name: str
    max_running: int
    running: dict[int, None] = field(default_factory=dict)  # request ids, in order
    queue: dict[int, deque[int]] = field(default_factory=dict)  # group -> request ids, none empty
    num_queued: int = 0

    @property
    def running_and_reserve(self) -> int:
        """A quarter more wait there, for the next step to take the room of what ends."""
        return self.max_running + max(1, self.max_running // 4)

    def push(self, group: int, request_ids: deque[int], *, first: bool = False) -> None:
        self.num_queued += len(request_ids)
        there = self.queue.get(group)
        if there is None:
            self.queue = {group: request_ids, **self.queue} if first else self.queue
            self.queue.setdefault(group, request_ids)
        elif first:
            there.extendleft(reversed(request_ids))
        else:
            there.extend(request_ids)

    def pop(self) -> int:
        group, request_ids = next(iter(self.queue.items()))
        request_id = request_ids.popleft()
        self.num_queued -= 1
        if not request_ids:
            del self.queue[group]
        return request_id

    def pop_group(self) -> tuple[int, deque[int]]:
        group = next(iter(self.queue))
        request_ids = self.queue.pop(group)
        self.num_queued -= len(request_ids)
        return group, request_ids

    def discard(self, group: int, request_id: int) -> None:
        self.queue[group].remove(request_id)
        self.num_queued -= 1
        if not self.queue[group]:
            del self.queue[group]


@dataclass(slots=True)
class _Group:
    home: str | None = None
    num_unfinished: int = 0


class Router:
    """Requests of a group go to the same replica, where they meet their prefix and their siblings'
    tokens: to its home, a pure function of the group and of who is alive, so that the next epoch
    finds it again. A replica with room takes the group that has waited longest at the one
    with the longest queue, and is the home of that group while any of it is unfinished.

    Deterministic: the same calls give the same answers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: all replicas there will ever be; they take requests once they `join`."""
        self._names = list(names)
        self._replicas: dict[str, _ReplicaQueue] = {}
        self._groups: dict[int, _Group] = {}
        self._requests: dict[int, tuple[int, str | None]] = {}  # id -> group, where it runs
        self._unassigned: list[int] = []  # while nobody takes requests
        self._alone: dict[int, None] = {}  # waiting to run alone, in order
        self._reserved: _ReplicaQueue | None = None  # takes only requests that run alone

    @property
    def num_waiting(self) -> int:
        """Requests that no replica has."""
        queued = sum(replica.num_queued for replica in self._replicas.values())
        return queued + len(self._unassigned) + len(self._alone)

    def join(self, name: str, max_running: int) -> None:
        self._replicas[name] = _ReplicaQueue(name, max_running)
        unassigned, self._unassigned = self._unassigned, []
        for request_id in unassigned:
            self._queue(request_id, first=False)

    def leave(self, name: str) -> list[int]:
        """``name`` is gone; the requests it had, in the order it got them. They are forgotten.

        What was queued for it is queued elsewhere.
        """
        replica = self._replicas.pop(name, None)
        if replica is None:
            return []
        if self._reserved is replica:
            self._reserved = None
        lost = list(replica.running)
        for request_id in lost:
            self._forget(request_id)
        for group, request_ids in replica.queue.items():
            if self._replicas:
                self._home(group).push(group, request_ids)
            else:
                self._unassigned += request_ids
        return lost

    def add(self, request_id: int, group: int, *, first: bool = False, alone: bool = False) -> None:
        """Queue a request; ``first``: before all others. ``alone``: it shares its replica with no
        other, and waits until one has run empty for it."""
        self._requests[request_id] = (group, None)
        self._groups.setdefault(group, _Group()).num_unfinished += 1
        if alone:
            self._alone[request_id] = None
        elif self._replicas:
            self._queue(request_id, first=first)
        else:
            self._unassigned.append(request_id)

    def remove(self, request_id: int) -> str | None:
        """Forget a request that has ended or is wanted no more. Returns the replica that has it, if
        any."""
        group, name = self._requests[request_id]
        if name is not None:
            del self._replicas[name].running[request_id]
        elif request_id in self._alone:
            del self._alone[request_id]
        elif request_id in self._unassigned:
            self._unassigned.remove(request_id)
        else:
            self._home(group).discard(group, request_id)
        self._forget(request_id)
        return name

    def take(self) -> dict[str, list[int]]:
        """The requests to hand out now, and to which replica."""
        taken: dict[str, list[int]] = {}
        for request_id, replica in self._assignments():
            group, _ = self._requests[request_id]
            self._requests[request_id] = (group, replica.name)
            replica.running[request_id] = None
            taken.setdefault(replica.name, []).append(request_id)
        return taken

    def _assignments(self) -> Iterator[tuple[int, _ReplicaQueue]]:
        yield from self._assign_alone()
        open_replicas = [
            replica for replica in self._replicas.values() if replica is not self._reserved
        ]
        for replica in open_replicas:
            while replica.queue and len(replica.running) < replica.max_running:
                yield replica.pop(), replica
        while open_replicas and any(replica.queue for replica in self._replicas.values()):
            idlest = min(open_replicas, key=lambda replica: len(replica.running))
            if len(idlest.running) >= idlest.max_running:
                break
            self._move_group(idlest)
            while idlest.queue and len(idlest.running) < idlest.max_running:
                yield idlest.pop(), idlest
        for replica in open_replicas:
            while replica.queue and len(replica.running) < replica.running_and_reserve:
                yield replica.pop(), replica

    def _assign_alone(self) -> Iterator[tuple[int, _ReplicaQueue]]:
        if self._alone and self._reserved is None and self._replicas:
            self._reserved = min(self._replicas.values(), key=lambda replica: len(replica.running))
        if self._reserved is None or self._reserved.running:
            return
        if self._alone:
            request_id = next(iter(self._alone))
            del self._alone[request_id]
            yield request_id, self._reserved
        else:
            self._reserved = None

    def _move_group(self, taker: _ReplicaQueue) -> None:
        longest = max(self._replicas.values(), key=lambda replica: replica.num_queued)
        group, request_ids = longest.pop_group()
        self._groups[group].home = taker.name
        taker.push(group, request_ids)

    def _queue(self, request_id: int, *, first: bool) -> None:
        group, _ = self._requests[request_id]
        self._home(group).push(group, deque([request_id]), first=first)

    def _home(self, group: int) -> _ReplicaQueue:
        """The queue of a group's home: the replica that has some of it unfinished, else the one its
        hash leads to.

        Each try is as good as random, and the first that is alive is it: so the groups of one that
        died are spread over the others, and nobody else's move.
        """
        known = self._groups[group]
        attempt = group
        while known.home not in self._replicas:
            attempt = split_mix(attempt)
            known.home = self._names[attempt % len(self._names)]
        return self._replicas[known.home]

    def _forget(self, request_id: int) -> None:
        group, _ = self._requests.pop(request_id)
        known = self._groups[group]
        known.num_unfinished -= 1
        if not known.num_unfinished:
            del self._groups[group]
