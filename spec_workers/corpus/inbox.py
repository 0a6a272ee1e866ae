"""Tokens that other engines committed, on their way into this one's corpus."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ngram_native import Corpus
from rollout.engine.draft_corpus import CorpusDelta
from rollout.errors import InvalidInputError

_MAX_VERSIONS = 64
"""Changes of policy remembered: what is older than all of them hardly counts as a draft."""

_Key = tuple[int, int]  # sender, its request id


@dataclass(slots=True)
class _Foreign:
    """A rollout of another engine."""

    group: int
    context: NDArray[np.int32] | None  # until the corpus has it
    sequence_id: int
    received: int = 0  # emitted tokens that came, in the corpus or not
    ended: bool = False
    waiting: deque[tuple[int, NDArray[np.int32]]] = field(default_factory=deque)  # version, tokens

    @property
    def waiting_bytes(self) -> int:
        context = 0 if self.context is None else self.context.nbytes
        return context + sum(tokens.nbytes for _, tokens in self.waiting)


class CorpusInbox:
    """Feeds deltas to the corpus, a bounded number of tokens each step.

    A foreign rollout enters as an own one does: its prompt unless the group has it, then its
    tokens, each once, into the live scope and its group's, as old as the weights that sampled them.

    What a delta does depends on its own sender's earlier deltas alone. Taken in any order, those of
    several senders leave the same documents in the same scopes. Drafts then agree where a context
    has come no more often than the corpus looks at (``max_candidates``, ``max_steps``), but for
    rounding and the order of equally probable nodes; where it has come more often, the latest
    occurrences count, and the latest is what was learned last. A resubmitted rollout that comes
    before what it continues is an exception: its beginning may be held twice.

    A delta received twice changes nothing. After one that was lost, what continues it is left out.
    Bounded: at most ``max_bytes`` wait, and at most half of the corpus's sequences are foreign;
    beyond that whole rollouts are dropped, the oldest first.
    """

    def __init__(self, corpus: Corpus, max_bytes: int, vocab_size: int) -> None:
        self._corpus = corpus
        self._max_bytes = max_bytes
        self._vocab_size = vocab_size
        self.max_sequences = corpus.max_sequences // 2
        self._received: dict[int, int] = {}  # sender -> number of its latest delta
        self._rollouts: OrderedDict[_Key, _Foreign] = OrderedDict()  # the longest silent first
        self._queue: OrderedDict[_Key, int] = OrderedDict()  # those with something waiting -> bytes
        self._waiting_bytes = 0
        self._num_open = 0
        self._next_sequence = -1  # own requests count up from 0
        self._versions: deque[int] = deque(maxlen=_MAX_VERSIONS)
        self.learned_tokens = 0
        self.lost_rollouts = 0

    def put(self, delta: CorpusDelta) -> None:
        """Take in a delta. Raises InvalidInputError for tokens outside of the vocabulary."""
        for name in ("context_tokens_M", "tokens_N"):
            tokens = getattr(delta, name)
            if tokens.size and (largest := int(tokens.max())) >= self._vocab_size:
                raise InvalidInputError(
                    f"delta.{name}", largest, f"must be in [0, {self._vocab_size})"
                )
        if delta.number <= self._received.get(delta.sender, -1):
            return
        self._received[delta.sender] = delta.number
        for b in range(delta.rollouts_B.size):
            self._put_piece(delta, b)
        while self._waiting_bytes > self._max_bytes:
            key, _ = next(iter(self._queue.items()))
            self._lose(key)

    def feed(self, version: int, max_tokens: int) -> None:
        """Let the corpus learn waiting tokens, at most about ``max_tokens``. Called between two
        steps.

        ``version``: of the weights in use.
        """
        if not self._versions or self._versions[-1] != version:
            self._versions.append(version)
        while self._queue and max_tokens > 0:
            key, num_bytes = self._queue.popitem(last=False)
            self._waiting_bytes -= num_bytes
            max_tokens -= self._learn(key, self._rollouts[key])

    def _put_piece(self, delta: CorpusDelta, b: int) -> None:
        key = (delta.sender, int(delta.rollouts_B[b]))
        context, start = int(delta.contexts_B[b]), int(delta.starts_B[b])
        foreign = self._rollouts.get(key)
        if foreign is None:
            if context < 0:
                return  # the rollout is over, was dropped, or began before this engine listened
            foreign = self._begin(delta, context)
            self._rollouts[key] = foreign
        tokens = delta.tokens_N[delta.offsets_B1[b] : delta.offsets_B1[b + 1]]
        if start != foreign.received:
            self._lose(key)
            return
        foreign.received += tokens.size
        if tokens.size:
            foreign.waiting.append((int(delta.versions_B[b]), tokens.copy()))
        foreign.ended |= bool(delta.ends_B[b])
        self._waiting_bytes -= self._queue.get(key, 0)
        self._queue[key] = foreign.waiting_bytes
        self._waiting_bytes += self._queue[key]
        self._rollouts.move_to_end(key)

    def _begin(self, delta: CorpusDelta, context: int) -> _Foreign:
        begin, end = delta.context_offsets_C1[context : context + 2]
        self._next_sequence -= 1
        return _Foreign(
            group=int(delta.groups_C[context]),
            context=delta.context_tokens_M[begin:end].copy(),
            sequence_id=self._next_sequence,
        )

    def _learn(self, key: _Key, foreign: _Foreign) -> int:
        """Let the corpus learn all waiting tokens of a rollout; returns their number."""
        count = 0
        while foreign.waiting:
            version, tokens = foreign.waiting.popleft()
            if foreign.context is not None:
                self._open(foreign, self._age(version))
            self._corpus.extend(
                np.array([foreign.sequence_id], dtype=np.int64),
                tokens,
                np.array([0, tokens.size], dtype=np.int64),
                age=self._age(version),
            )
            count += tokens.size
        if foreign.ended:
            self._forget(key)
        self.learned_tokens += count
        return count

    def _open(self, foreign: _Foreign, age: int) -> None:
        assert foreign.context is not None
        if self._num_open == self.max_sequences:
            self._lose(next(key for key, each in self._rollouts.items() if each.context is None))
        self._corpus.open(foreign.sequence_id, foreign.group, foreign.context, age=age)
        foreign.context = None
        self._num_open += 1

    def _lose(self, key: _Key) -> None:
        """Drop what waits of a sequence, and what is still to come of it."""
        self.lost_rollouts += 1
        self._waiting_bytes -= self._queue.pop(key, 0)
        self._forget(key)

    def _forget(self, key: _Key) -> None:
        foreign = self._rollouts.pop(key)
        if foreign.context is None:
            self._corpus.close(foreign.sequence_id)
            self._num_open -= 1

    def _age(self, version: int) -> int:
        """The number of changes of policy since this version; 0 also for one that this engine has
        yet to get."""
        for age, known in enumerate(reversed(self._versions)):
            if known == version:
                return age
        return 0 if version > self._versions[-1] else len(self._versions)
