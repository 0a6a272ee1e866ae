"""External corpora of ranks that run the same requests, and so must draft alike."""

from __future__ import annotations

import json
from contextlib import suppress

from rollout.engine.draft_corpus import ExternalState
from rollout.errors import InvalidInputError
from rollout.parallel import RankGroup
from spec_workers.corpus.external_loader import ExternalLoader

_ABSENT = "absent"


class RankLoads:
    """Publishes a corpus on all ranks in one step, once all have loaded it; if one fails, all do.

    Each rank loads its own, on its own threads, in its own time.
    """

    def __init__(self, loads: ExternalLoader, group: RankGroup) -> None:
        self._loads = loads
        self._group = group
        self._names: set[str] = set()  # begun, and neither published nor failed
        self.failures: dict[str, str] = {}  # name -> why, where it was not this rank's own failure

    def add(self, name: str) -> None:
        """Follow a load that has begun on this rank."""
        self._names.add(name)
        self.failures.pop(name, None)

    def remove(self, name: str) -> bool:
        """Stop following a load. Returns whether it failed through another rank: then the loads
        have nothing of it."""
        self._names.discard(name)
        return self.failures.pop(name, None) is not None

    def publish(self) -> None:
        """A call that all ranks make, at the same point between two steps."""
        if not any(self._group.all_gather_int(len(self._names))):
            return
        states = self._exchanged()
        for name in sorted({name for each in states for name in each}):
            of_ranks = [each.get(name, (_ABSENT, "was not begun there")) for each in states]
            if any(state == ExternalState.LOADING for state, _ in of_ranks):
                continue
            self._names.discard(name)
            failure = _first_failure(of_ranks)
            if failure is None:
                with suppress(ValueError):  # it has failed then, and is listed so
                    self._loads.publish_one(name)
            elif of_ranks[self._group.rank][0] == ExternalState.READY:
                self._loads.remove(name)
                self.failures[name] = failure

    def publish_one(self, name: str) -> None:
        """Publish one load on all ranks. Raises InvalidInputError on all where one cannot."""
        self._names.add(name)
        states = self._exchanged()
        self._names.discard(name)
        for rank, each in enumerate(states):
            state, error = each[name]
            if state not in (ExternalState.READY, ExternalState.PUBLISHED):
                raise InvalidInputError("name", name, f"is {state} on rank {rank} {error}".rstrip())
        self._loads.publish_one(name)

    def _exchanged(self) -> list[dict[str, tuple[str, str]]]:
        """State and error of the names, by rank."""
        own = {
            each.name: (each.state.value, each.error or "")
            for each in self._loads.statuses()
            if each.name in self._names
        }
        own |= dict.fromkeys(self._names - own.keys(), (_ABSENT, ""))
        return [
            {name: (state, error) for name, (state, error) in json.loads(text).items()}
            for text in self._group.all_gather_text(json.dumps(own))
        ]


def _first_failure(of_ranks: list[tuple[str, str]]) -> str | None:
    for rank, (state, error) in enumerate(of_ranks):
        if state not in (ExternalState.READY, ExternalState.PUBLISHED):
            return f"rank {rank}: {error or state}"
    return None
