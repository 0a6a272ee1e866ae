"""An engine on a thread of its own, for those who wait in asyncio or in many threads."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Self, TypeVar

from rollout.engine.protocol import Engine
from rollout.errors import EngineStateError, InvalidInputError, ParallelError
from rollout.types import Prompt, Request, Rollout, SamplingParams

log = logging.getLogger(__name__)

T = TypeVar("T")
E = TypeVar("E", bound=Engine)
OnTokens = Callable[[Request, int], None]
"""Called with a request that has new tokens, and the number it had emitted at the last call."""


class RequestHandle:
    def __init__(self, abort: Callable[[RequestHandle], None]) -> None:
        self.future: Future[Rollout] = Future()
        """The request's rollout. It is set on the loop's thread, so its callbacks must be short.
        ``asyncio.wrap_future`` it to await it; cancelling either aborts the request."""
        self.request_id: int | None = None
        """The engine's id of the request; None until the loop has queued it, and if it was
        refused."""
        self._abort = abort

    def abort(self) -> None:
        """End the request; ``future`` gets the rollout with what it has, finish_reason abort.

        Returns at once. Does nothing to a request that has ended or was refused.
        """
        self._abort(self)


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], None]
    future: Future[Any] | None = None  # of a `call`; fails if the loop breaks first


class _Listener:
    def __init__(self, request: Request, on_tokens: OnTokens) -> None:
        self._request, self._on_tokens = request, on_tokens
        self._reported = 0

    def tell(self) -> None:
        count = len(self._request.tokens) - self._request.prompt_len
        if count > self._reported:
            reported, self._reported = self._reported, count
            self._on_tokens(self._request, reported)


class EngineLoop(Generic[E]):
    """Drives one engine on a thread of its own; other threads and asyncio talk to it.

    While it lives, the engine is touched inside ``call`` alone. What is asked (submit, abort, call)
    is done in the order it was asked, between two steps. A step is run while ``engine.can_run`` and
    something is unfinished; else the thread sleeps until something is asked. So requests simply
    wait while the engine is paused, asleep, or its weights torn. Calls take turns with steps: once
    the calls since the last step have taken longer than that step, the next call waits for another
    step.

    A step that raises is a bug or a broken machine, and so is a call that loses a rank: every
    unfinished future gets an EngineStateError caused by what was raised, the engine drops their
    requests, and every later call raises the same. It is logged once, with its traceback.
    """

    def __init__(self, engine: E) -> None:
        """Raises InvalidInputError for an engine in lockstep: a thread that steps when it has
        reason to would leave the other ranks waiting."""
        if engine.lockstep:
            raise InvalidInputError(
                "lockstep", True, "not in an EngineLoop: call step() as often on every rank"
            )
        self._engine = engine
        self._changed = threading.Condition()
        # Guarded by the condition's lock; appended to by anyone, taken from by the loop.
        self._commands: deque[_Command] = deque()
        self._unfinished: set[RequestHandle] = set()
        self._held: deque[_Command] = deque()  # requests and aborts that are held back
        self._num_holders = 0
        self._closed = False
        self._failure: BaseException | None = None
        self.broken: Future[None] = Future()
        """Done when the loop has broken."""
        self._busy_since: float | None = None  # written by the loop alone, read by anyone
        # The loop's thread alone:
        self._queued: dict[int, RequestHandle] = {}  # by request id, until the engine hands it out
        self._listeners: dict[int, _Listener] = {}  # by request id, as long
        self._stopping = False
        self._step_seconds = 0.0  # of the last one
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        # A daemon does not keep the process alive, but must not be killed inside native code.
        atexit.register(self.close)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_seed: int | None = None,
        partial_ids: Sequence[int] = (),
        prompt_index: int = 0,
        sample_index: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> RequestHandle:
        """Queue one sample of one prompt; arguments as for `RolloutEngine.submit`.

        They are checked on the loop's thread: InvalidInputError or OutOfMemoryError is what the
        handle's future gets. ``on_tokens`` is called there too, after each step in which the
        request got tokens, so it must be short, take what it needs of the request and raise
        nothing; the last time before the future is settled. Raises EngineStateError when the loop
        is closed or broken.
        """
        handle = RequestHandle(self._post_abort)
        submit = partial(
            self._engine.submit,
            prompt,
            params,
            request_seed=request_seed,
            partial_ids=partial_ids,
            prompt_index=prompt_index,
            sample_index=sample_index,
        )
        with self._changed:
            self.require_open()
            self._unfinished.add(handle)
            self._post_request(_Command(lambda: self._submit(handle, submit, on_tokens)))
        handle.future.add_done_callback(
            lambda future: self._post_abort(handle) if future.cancelled() else None
        )
        return handle

    def call(self, function: Callable[[E], T]) -> Future[T]:
        """Run ``function(engine)`` on the loop's thread, between two steps.

        Its value or exception is the future's; an exception reaches nobody else. Generators handed
        to the engine inside it run on the loop's thread too, and nothing is generated meanwhile. It
        must not wait for a handle or another call: neither can come before it returns. A future
        cancelled before its turn is skipped. Requests it submits to the engine by hand have no
        handle: their rollouts are dropped.

        Raises EngineStateError when the loop is closed or broken.
        """
        future: Future[T] = Future()
        with self._changed:
            self.require_open()
            self._post(_Command(lambda: self._call(function, future), future))
        return future

    def abort_all(self) -> Future[int]:
        """Abort every request submitted before; returns how many had not ended.

        Their futures are settled before this one.
        """
        return self.call(self._abort_all)

    def require_open(self) -> None:
        """Raises EngineStateError when the loop is closed or broken."""
        if self._failure is not None:
            raise _broken(self._failure)
        if self._closed:
            raise EngineStateError("the engine loop is closed: make another one for this engine")

    @property
    def num_unfinished(self) -> int:
        """Requests the loop still has to do with; cancelled ones until it has aborted them."""
        with self._changed:
            return len(self._unfinished)

    @property
    def is_holding(self) -> bool:
        """Whether new requests are held back."""
        return self._num_holders > 0

    @contextmanager
    def holding(self) -> Iterator[list[RequestHandle]]:
        """A context in which the engine gets no new requests: they are submitted at its end, in the
        order they came. It gets the requests that have not ended when it begins."""
        with self._changed:
            self._num_holders += 1
            unfinished = list(self._unfinished)
        try:
            yield unfinished
        finally:
            with self._changed:
                self._num_holders -= 1
                if not self._num_holders:
                    self._let_in()

    @property
    def busy_seconds(self) -> float:
        """Seconds since the running step or call began; 0.0 while none runs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float = 60.0) -> None:
        """Do what was asked so far, abort what is unfinished, and end the thread.

        The engine is the caller's again. A second call does nothing. Raises TimeoutError when a
        step or a `call` is still running after ``timeout`` seconds; the loop closes behind it.
        """
        if threading.current_thread() is self._thread:
            raise EngineStateError("close() inside call(): the loop cannot wait for itself")
        with self._changed:
            if not self._closed:
                self._closed = True
                self._let_in()
                self._post(_Command(self._stop))
        atexit.unregister(self.close)
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine loop is still in a step or a call after {timeout} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except TimeoutError as late:
            if error is None:
                raise
            error.add_note(str(late))  # what the body raised says more

    # Any thread

    def _post(self, command: _Command) -> None:
        """Queue a command. The caller holds the lock."""
        self._commands.append(command)
        self._changed.notify()

    def _post_request(self, command: _Command) -> None:
        """Queue a submit or an abort, in their order. The caller holds the lock."""
        if self._num_holders:
            self._held.append(command)
        else:
            self._post(command)

    def _let_in(self) -> None:
        """Queue what was held back. The caller holds the lock."""
        if not self._stopping and self._failure is None:
            while self._held:
                self._post(self._held.popleft())

    def _post_abort(self, handle: RequestHandle) -> None:
        with self._changed:  # once the loop has ended, nobody would run it: all is settled
            if self._failure is None and not self._closed:
                held = self._num_holders and handle.request_id is None
                (self._post_request if held else self._post)(_Command(lambda: self._abort(handle)))

    # The loop's thread

    def _run(self) -> None:
        try:
            self._engine.set_driver_thread()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._commands or self._can_step)
                self._run_commands()
                if self._stopping:
                    return
                if self._can_step:
                    self._step()
                self._busy_since = None
        except BaseException as error:  # nobody joins this thread for its exception
            self._break(error)
        finally:
            self._busy_since = None

    @property
    def _can_step(self) -> bool:
        """Whether a step can run. Only this thread changes that, so sleeping on it loses no
        wake-up."""
        return self._engine.can_run and self._engine.has_unfinished

    def _run_commands(self) -> None:
        # Submits and aborts are short, and the sooner done the fuller the batch.
        calls_seconds = 0.0
        for _ in range(len(self._commands)):  # commands that come meanwhile wait for one step
            self._busy_since = time.monotonic()
            is_call = self._commands[0].future is not None
            if is_call and calls_seconds > self._step_seconds:
                return
            started = time.perf_counter()
            self._commands.popleft().run()
            self._hand_out(self._engine.take_ended())
            if is_call:
                calls_seconds += time.perf_counter() - started

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        started = time.perf_counter()
        self._hand_out(self._engine.step())
        for listener in self._listeners.values():
            listener.tell()
        self._step_seconds = time.perf_counter() - started

    def _submit(
        self, handle: RequestHandle, submit: Callable[[], Request], on_tokens: OnTokens | None
    ) -> None:
        try:
            request = submit()
        except ParallelError:  # not the input's fault
            raise
        except Exception as error:  # the engine is as it was
            self._resolve(handle, error)
            return
        handle.request_id = request.request_id
        self._queued[request.request_id] = handle
        if on_tokens is not None:
            self._engine.watch(request.request_id)
            self._listeners[request.request_id] = _Listener(request, on_tokens)

    def _abort(self, handle: RequestHandle) -> None:
        if handle.request_id is not None:
            self._engine.abort(handle.request_id)

    def _abort_all(self, engine: E) -> int:
        count = len(self._queued)
        for request_id in list(self._queued):
            engine.abort(request_id)
        self._hand_out(engine.take_ended())
        return count

    def _call(self, function: Callable[[E], T], future: Future[T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(self._engine)
        except BaseException as error:
            future.set_exception(error)
            if isinstance(error, ParallelError):  # nor does any other call reach all ranks
                raise
        else:
            future.set_result(result)

    def _stop(self) -> None:
        self._abort_all(self._engine)
        self._stopping = True

    def _hand_out(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            listener = self._listeners.pop(rollout.request_id, None)
            if listener is not None:
                listener.tell()
            handle = self._queued.pop(rollout.request_id, None)
            if handle is not None:
                self._resolve(handle, rollout)

    def _resolve(self, handle: RequestHandle, outcome: Rollout | BaseException) -> None:
        with self._changed:
            self._unfinished.discard(handle)
        if not handle.future.set_running_or_notify_cancel():
            return  # cancelled
        if isinstance(outcome, Rollout):
            handle.future.set_result(outcome)
        else:
            handle.future.set_exception(outcome)

    def _break(self, error: BaseException) -> None:
        log.error("the engine loop is broken: nothing runs any more", exc_info=error)
        with self._changed:
            self._failure = error
            commands, self._commands = self._commands, deque()
            handles = list(self._unfinished)
        try:
            with suppress(ParallelError):  # of several ranks the others are gone
                for request_id in self._queued:
                    self._engine.abort(request_id)
                self._engine.take_ended()
        finally:
            for handle in handles:
                self._resolve(handle, _broken(error))
            for command in commands:
                future = command.future
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(_broken(error))
            self.broken.set_result(None)


def _broken(error: BaseException) -> EngineStateError:
    """A new error for each caller: raising an exception writes its traceback into it."""
    broken = EngineStateError(f"the engine loop is broken since it met {error!r}")
    broken.__cause__ = error
    return broken
