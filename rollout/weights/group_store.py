"""Notes that the members of a weight group leave for one another, in the store of rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from rollout.errors import WeightUpdateError
from rollout.parallel.time_limit import answered

T = TypeVar("T")

_POLL_SECONDS = (0.0005, 0.02)  # the first pause, and the longest


class GroupStore:
    """JSON objects by key. A wait lasts at most the given seconds, and
    `time_limit.ANSWER_SECONDS` more where the store does not answer.

    A note is written over, never removed: a store's get waits for a key that is not there, so one
    that went between the look for it and the get would block its reader.
    """

    def __init__(self, store: Store, group_name: str) -> None:
        self._store = PrefixStore(f"notes/{group_name}", store)
        self._group_name = group_name
        self._lost = ""  # why the store is not asked any more

    def put(self, key: str, note: dict[str, Any]) -> None:
        """Leave a note, over the one there may be."""
        self._guarded(lambda: self._store.set(key, json.dumps(note)))

    def claim(self, key: str, note: dict[str, Any]) -> bool:
        """`put`, unless somebody was first."""
        text = json.dumps(note)
        found = self._guarded(lambda: self._store.compare_set(key, "", text))
        return bool(found.decode() == text)

    def get(self, key: str) -> dict[str, Any] | None:
        """The note, if there is one."""
        return self._guarded(partial(self._read, key))

    def _read_all(self, keys: list[str]) -> dict[str, dict[str, Any] | None]:
        return {key: self._read(key) for key in keys}

    def _read(self, key: str) -> dict[str, Any] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def collect(
        self,
        keys: Iterable[str],
        seconds: float,
        accept: Callable[[dict[str, Any]], bool] = lambda note: True,
    ) -> dict[str, dict[str, Any]]:
        """The notes that ``accept`` takes: all of the keys, or after ``seconds`` those so far."""
        missing, notes = list(keys), dict[str, dict[str, Any]]()
        deadline, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
        while True:
            found = self._guarded(partial(self._read_all, missing))
            notes |= {key: note for key, note in found.items() if note is not None and accept(note)}
            missing = [key for key in missing if key not in notes]
            if not missing or time.monotonic() >= deadline:
                return notes
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            if self._lost:
                raise TimeoutError(self._lost)
            return answered(call)
        except (RuntimeError, TimeoutError) as error:
            reason = str(error).splitlines()[0]
            if isinstance(error, TimeoutError):
                self._lost = reason
            raise WeightUpdateError(
                f"group {self._group_name!r}: its rank 0, the sender, cannot be reached: {reason}"
            ) from error
