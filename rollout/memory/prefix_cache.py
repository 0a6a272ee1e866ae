"""The prefix cache: a radix tree over token ids whose nodes own KV slots that requests share.

This is RadixAttention (Zheng et al. 2024, SGLang) with page size one. An edge holds a run of tokens
and their slots. Any two children of a node differ in their first token. Unlocked leaves are
evicted, least recently used first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rollout.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Node:
    """A tree node and the run of tokens on the edge from ``parent``. Only the root's is empty."""

    tokens: np.ndarray  # int32
    slots: np.ndarray  # int32, parallel to tokens
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    locks: int = 0  # held at this node or below, so a locked node's ancestors are locked too
    last_used: int = 0  # clock of the last match or insert that passed here
    queued: bool = False  # in the eviction heap, under the last_used of that time
    detached: bool = False  # removed by reset() while locked: freed with its last lock


class PrefixCache:
    """Owns the slots of its nodes until eviction and reset."""

    def __init__(self, free: Callable[[np.ndarray], None]) -> None:
        """``free``: takes slots back, int32."""
        self._free = free
        self._clock = 0
        self._serial = itertools.count()
        self._detached: dict[Node, None] = {}  # an ordered set
        self._plant()

    def _plant(self) -> None:
        empty = np.empty(0, dtype=np.int32)
        self._root = Node(tokens=empty, slots=empty, parent=None)
        self._heap: list[tuple[int, int, Node]] = []  # (last_used, serial, node), some outdated
        self._evictable = 0

    @property
    def evictable(self) -> int:
        """Slots that evict() can free now: those of unlocked nodes."""
        return self._evictable

    def match_len(self, tokens: np.ndarray) -> int:
        """Length of the longest cached prefix of ``tokens``, int32. Changes nothing."""
        return self._descend(tokens)[2]

    def match_slots(self, tokens: np.ndarray) -> np.ndarray:
        """The slots of the longest cached prefix of ``tokens``, int32[m]. Changes nothing."""
        node, _, depth = self._descend(tokens)
        return self.path_slots(node)[:depth]

    def match(self, tokens: np.ndarray) -> tuple[np.ndarray, Node]:
        """The slots of the longest cached prefix, int32[m], and the node it ends at.

        Lock the node before anything else is allocated, or the slots may be evicted.
        """
        node, within, _ = self._descend(tokens)
        if within < len(node.tokens):
            node = self._split(node, within)
        self._touch(node)
        return self.path_slots(node), node

    def insert(self, tokens: np.ndarray, slots: np.ndarray) -> tuple[int, Node]:
        """Cache a prefix and its slots, both int32[n]. Returns (held, node at its end).

        The first ``held`` tokens were in the tree already, under the tree's own slots:
        ``slots[:held]`` stay the caller's, ``slots[held:]`` are the tree's from here on.
        """
        node, within, held = self._descend(tokens)
        if within < len(node.tokens):
            node = self._split(node, within)
        if held < len(tokens):
            # Copies: a view would keep the caller's whole array alive.
            leaf = Node(tokens=tokens[held:].copy(), slots=slots[held:].copy(), parent=node)
            node.children[int(leaf.tokens[0])] = leaf
            self._evictable += len(leaf.tokens)
            node = leaf
        self._touch(node)
        self._queue(node)
        return held, node

    def lock(self, node: Node) -> None:
        """Protect the prefix that ends at ``node`` from eviction until unlocked as often."""
        for ancestor in _to_root(node):
            if ancestor.locks == 0:
                self._evictable -= len(ancestor.tokens)
            ancestor.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of ``node``."""
        for ancestor in _to_root(node):
            ancestor.locks -= 1
            assert ancestor.locks >= 0, "unlocked more often than locked"
            if ancestor.locks:
                continue
            if ancestor.detached:
                self._free(ancestor.slots)
                del self._detached[ancestor]
            else:
                self._evictable += len(ancestor.tokens)
                self._queue(ancestor)

    def evict(self, count: int) -> int:
        """Free ``count`` slots, or fewer if fewer are evictable. Returns how many.

        A leaf longer than needed loses only its tail.
        """
        freed = 0
        while freed < count and self._heap:
            last_used, _, leaf = heapq.heappop(self._heap)
            leaf.queued = False
            if leaf.last_used != last_used:
                self._queue(leaf)  # used since it was queued: requeue it, if it is still a leaf
                continue
            if leaf.children or leaf.locks:
                continue
            assert leaf.parent is not None
            retained = max(0, len(leaf.tokens) - (count - freed))
            freed += len(leaf.tokens) - retained
            self._free(leaf.slots[retained:])
            if retained:
                leaf.tokens, leaf.slots = leaf.tokens[:retained], leaf.slots[:retained]
                self._queue(leaf)
            else:
                del leaf.parent.children[int(leaf.tokens[0])]
                self._queue(leaf.parent)
        self._evictable -= freed
        return freed

    def reset(self) -> None:
        """Forget every prefix. Locked nodes match no more and are freed when unlocked."""
        for node in self._nodes():
            if node.locks:
                node.detached = True
                self._detached[node] = None
            else:
                self._free(node.slots)
        self._plant()

    def held_slots(self) -> Iterator[np.ndarray]:
        """The slots of every node, including locked ones that reset() detached."""
        for node in itertools.chain(self._nodes(), self._detached):
            yield node.slots

    def path_slots(self, node: Node) -> np.ndarray:
        """The slots of the prefix that ends at ``node``, int32."""
        return np.concatenate([n.slots for n in reversed(list(_to_root(node)))])

    def check_integrity(self, locked: Iterable[Node]) -> None:
        """Raise IntegrityError unless the tree is well formed and its counts are right.

        ``locked``: the node of every lock now held, as often as it was locked.
        """

        def require(ok: bool, problem: str) -> None:
            if not ok:
                raise IntegrityError(f"prefix cache: {problem}")

        locks = Counter(ancestor for node in locked for ancestor in _to_root(node))
        queued = Counter(node for _, _, node in self._heap)
        evictable = 0
        for node in self._nodes():
            require(len(node.tokens) == len(node.slots), "tokens and slots differ in length")
            require((len(node.tokens) == 0) == (node is self._root), "an empty node")
            require(not node.detached, "a detached node is still in the tree")
            require(node.locks == locks[node], f"{node.locks} locks, {locks[node]} holders")
            require(queued[node] == node.queued, "the eviction heap and a node disagree")
            for first, child in node.children.items():
                require(child.parent is node, "a child does not know its parent")
                require(first == int(child.tokens[0]), "a child under the wrong token")
                require(child.last_used <= node.last_used, "a parent older than its child")
            if not node.locks:
                evictable += len(node.tokens)
                leaf = not node.children and node is not self._root
                require(node.queued or not leaf, "an evictable leaf is not queued")
        require(evictable == self._evictable, f"{evictable} evictable, {self._evictable} counted")
        for node in self._detached:
            require(0 < node.locks == locks[node], "a detached node nobody holds")

    def _nodes(self) -> Iterator[Node]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _descend(self, tokens: np.ndarray) -> tuple[Node, int, int]:
        """(deepest node reached, how many of its own tokens match, how many match in all)."""
        node, depth = self._root, 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            common = _common_len(child.tokens, tokens[depth:])
            node, depth = child, depth + common
            if common < len(child.tokens):
                return node, common, depth
        return node, len(node.tokens), depth

    def _split(self, node: Node, at: int) -> Node:
        """Put a new node over the first ``at`` tokens of ``node`` and return it.

        ``node`` itself holds the rest, so a lock on it still covers the whole prefix.
        """
        assert node.parent is not None
        upper = Node(
            tokens=node.tokens[:at],
            slots=node.slots[:at],
            parent=node.parent,
            children={int(node.tokens[at]): node},
            locks=node.locks,
            last_used=node.last_used,
        )
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        return upper

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for ancestor in _to_root(node):
            ancestor.last_used = self._clock

    def _queue(self, node: Node) -> None:
        """Queue a node for eviction if it is an unlocked leaf."""
        if node.children or node.locks or node.queued or node is self._root:
            return
        node.queued = True
        heapq.heappush(self._heap, (node.last_used, next(self._serial), node))


def _to_root(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def _common_len(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
