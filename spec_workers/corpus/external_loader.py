"""Loads of external corpora in the background."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from ngram_native import Corpus, ExternalBuilder, Withdrawn
from rollout.engine.draft_corpus import ExternalCorpus, ExternalState, check_name
from rollout.errors import InvalidInputError
from spec_workers.corpus.external_load import Documents, ExternalLoad


class ExternalLoader:
    """The external corpora of one Corpus, in every state. Safe to call from many threads.

    A load reads and indexes its documents on a background thread, then is ``ready`` until it is
    published whole. A load that fails is ``failed``, with the reason, until it is removed or
    started again; nothing of it was loaded. In a forked child, which has no background threads,
    loads in progress have failed. All errors are InvalidInputError. `close` it at the end; a
    program that exits without doing so cancels its loads.

    Args:
        max_tokens: Bound on the tokens of all external corpora together, loading ones included.
            The corpus's ``max_external_bytes`` bounds their memory, working memory included.
        max_loading: Loads that run at once; others are queued.
    """

    def __init__(self, corpus: Corpus, *, max_tokens: int, max_loading: int = 2) -> None:
        self._corpus = corpus
        self._max_tokens = max_tokens
        self._max_loading = max_loading
        self._changed = threading.Condition()  # its lock guards the attributes below
        self._loads: dict[str, ExternalLoad] = {}  # all but published ones
        self._waiting: deque[ExternalLoad] = deque()
        self._num_loading = 0  # threads that take from _waiting
        self._threads: list[threading.Thread] = []
        self._any_ready = False
        self._closed = False
        self._orphans: list[ExternalLoad] = []
        _call_in_children(self._leave_parent)

    def start(
        self,
        name: str,
        documents: Documents,
        *,
        fraction_read: Callable[[], float] | None = None,
        on_request: bool = False,
    ) -> None:
        """Start to load a corpus.

        Args:
            name: Text that UTF-8 can encode. No corpus of this name may be loading, ready or
                published.
            documents: Batches of documents, each int32 ``(n,)`` with tokens >= 0. Iterated on a
                background thread, so a generator may read and tokenise a file. Cancelling takes
                effect between two batches; a cancelled generator is closed.
            fraction_read: Returns how much of ``documents`` was read, in [0, 1]; called by
                `statuses`.
            on_request: Whether `publish` skips it, so that only `publish_one` publishes it.
        """
        check_name("name", name)
        with self._changed:
            if self._closed:
                raise InvalidInputError("name", name, "came after close()")
            held = self._loads.get(name)
            if held is not None and held.state is not ExternalState.FAILED:
                raise InvalidInputError("name", name, f"is {held.state} already; remove() it first")
            if name in self._corpus.external_names():
                raise InvalidInputError("name", name, "is published already; remove() it first")
            load = ExternalLoad(
                name,
                documents,
                fraction_read,
                self._corpus.external_builder(),
                on_request=on_request,
            )
            if self._num_loading < self._max_loading:
                self._start_thread(self._run_waiting)
                self._num_loading += 1
            self._loads[name] = load
            self._waiting.append(load)

    def publish(self) -> list[str]:
        """Publish the loads that are ready, except those on request, and return their names,
        sorted.

        Call it between two steps. It costs almost nothing if none is ready. A load that cannot be
        published, for example because its name was taken meanwhile, fails; nothing is raised.
        """
        if not self._any_ready:
            return []
        with self._changed:
            return [name for name in sorted(self._ready()) if self._publish(self._loads[name])]

    def publish_one(self, name: str) -> None:
        """Publish ``name`` if it is not published yet. Call it between two steps.

        Raises InvalidInputError if it is unknown, loading or failed, or if publishing fails.
        """
        with self._changed:
            load = self._loads.get(name)
            if load is None:
                if name in self._corpus.external_names():
                    return
                raise InvalidInputError("name", name, "is not loaded; start() it first")
            if load.state is ExternalState.LOADING:
                raise InvalidInputError("name", name, "is loading; wait() for it first")
            if load.state is ExternalState.FAILED or not self._publish(load):
                raise InvalidInputError("name", name, f"has failed: {load.error}")

    def remove(self, name: str) -> None:
        """Remove a corpus: a published one at once, a loading one by cancelling it.

        Its memory is freed in the background.
        """
        with self._changed:
            load = self._loads.pop(name, None)
            if load is not None:
                self._drop(load)
            if load is None or name in self._corpus.external_names():
                self._free(self._corpus.withdraw_external(name))
            self._notify()

    def statuses(self) -> list[ExternalCorpus]:
        """All external corpora, sorted by name, including those that were not loaded here.

        A published corpus for whose name a later load failed has state PUBLISHED and that load's
        error.
        """
        with self._changed:
            loads = [load.status() for load in self._loads.values()]
            sizes = self._corpus.external_sizes()
        statuses = {
            name: ExternalCorpus(
                name=name,
                state=ExternalState.PUBLISHED,
                num_tokens=num_tokens,
                num_bytes=num_bytes,
                progress=1.0,
                error=None,
            )
            for name, (num_tokens, num_bytes) in sizes.items()
        }
        for load in loads:
            if load.name in sizes and load.state is ExternalState.FAILED:
                load = replace(statuses[load.name], error=load.error)
            statuses[load.name] = load
        return [statuses[name] for name in sorted(statuses)]

    def wait(self, name: str, timeout: float | None = None) -> ExternalCorpus:
        """Wait until ``name`` is no longer loading, at most ``timeout`` seconds; return its
        status."""

        def has_ended() -> bool:
            load = self._loads.get(name)
            return load is None or load.state is not ExternalState.LOADING

        with self._changed:
            self._changed.wait_for(has_ended, timeout)
            for status in self.statuses():
                if status.name == name:
                    return status
        raise InvalidInputError("name", name, "is not loaded; start() it first")

    def close(self) -> None:
        """Cancel loads, drop everything that is not published, and join the threads."""
        with self._changed:
            self._closed = True
            for load in self._loads.values():
                self._drop(load)
            self._loads.clear()
            self._notify()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    # Methods that need the lock held:

    def _ready(self) -> set[str]:
        """Names of the loads that `publish` publishes."""
        ready = (each for each in self._loads.values() if each.state is ExternalState.READY)
        return {each.name for each in ready if not each.on_request}

    def _notify(self) -> None:
        self._any_ready = bool(self._ready())
        self._changed.notify_all()

    def _start_thread(self, target: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, name="external corpus")
        thread.start()
        self._threads.append(thread)

    def _free(self, memory: ExternalBuilder | Withdrawn) -> None:
        try:
            self._start_thread(memory.free)
        except RuntimeError:  # no more threads, or the program is ending
            memory.free()

    def _publish(self, load: ExternalLoad) -> bool:
        try:
            self._corpus.publish_external(load.name, load.builder)
        except Exception as error:  # the load fails, not the step that publishes
            load.fail(error)
            self._free(load.builder)
        else:
            del self._loads[load.name]
        self._notify()
        return load.state is ExternalState.READY

    def _drop(self, load: ExternalLoad) -> None:
        if load in self._waiting:
            self._waiting.remove(load)
            load.cancel_unstarted()
        elif load.state is ExternalState.LOADING:
            load.cancel()  # its thread frees the memory
        elif load.state is ExternalState.READY:
            self._free(load.builder)

    # Called in a forked child, before anything else:

    def _leave_parent(self) -> None:
        """Fail the loads in progress: a forked child has none of the parent's threads."""
        self._changed = threading.Condition()
        self._threads, self._num_loading = [], 0
        self._waiting.clear()
        for load in self._loads.values():
            if load.state is ExternalState.LOADING:
                load.fail(ChildProcessError("the process was forked while it loaded; add it again"))
                self._orphans.append(load)  # never freed: its builder may be locked or half changed
        self._any_ready = bool(self._ready())

    # Called on the background threads:

    def _run_waiting(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._num_loading -= 1
                    return
                load = self._waiting.popleft()
            self._run(load)

    def _run(self, load: ExternalLoad) -> None:
        built, failure = False, None
        try:
            built = load.run(self._admit)
        except BaseException as error:  # recorded as the load's error: nobody catches it here
            failure = error
        if not built:
            load.builder.free()  # before the state says failed, so that the memory is free then
        with self._changed:
            if built:
                load.state = ExternalState.READY
            else:
                load.fail(failure)
            self._notify()
        if load.is_cancelled:
            load.builder.free()

    def _admit(self, load: ExternalLoad, num_tokens: int) -> None:
        with self._changed:
            held = sum(tokens for tokens, _ in self._corpus.external_sizes().values())
            held += sum(each.num_tokens for each in self._loads.values())
            if held + num_tokens > self._max_tokens:
                raise ValueError(
                    f"documents=<{load.num_tokens + num_tokens} tokens or more>: do not fit beside "
                    f"the {held - load.num_tokens} of other external corpora in "
                    f"max_tokens={self._max_tokens}; raise it or remove one"
                )
            load.num_tokens += num_tokens


def _call_in_children(method: Callable[[], None]) -> None:
    """Call ``method`` in forked children, without keeping its object alive."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        alive = held()
        if alive is not None:
            alive()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
