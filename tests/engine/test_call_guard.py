"""One thread at a time uses an engine; the others are told, and nothing is lost."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import methodcaller
from types import FunctionType

import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.engine import call_guard
from rollout.engine.engine_loop import EngineLoop
from rollout.errors import EngineStateError
from tests.helpers.hang import HANG_SECONDS

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=12, seed=3, n=2, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=1)
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)

# Of a driver's thread, or without an effect on the engine: any thread may call them at any time.
UNGUARDED = {"set_driver_thread", "leading", "watch", "metrics", "compile_grammar"}
# Guarded where they begin to act.
LATER: dict[str, Callable[[RolloutEngine], object]] = {
    "stream": lambda engine: next(engine.stream(PROMPTS, PARAMS)),
    "without_speculation": lambda engine: engine.without_speculation().__enter__(),
}


def guarded_calls() -> list[Callable[[RolloutEngine], object]]:
    """Every public call, by what the class has: a new one is refused too, or is listed above.

    The guard comes before arguments are looked at, so that none are needed.
    """
    functions = {
        name
        for name, member in vars(RolloutEngine).items()
        if isinstance(member, FunctionType) and not name.startswith("_")
    }
    assert functions > UNGUARDED | LATER.keys()
    return [
        *LATER.values(),
        *(methodcaller(name) for name in sorted(functions - UNGUARDED - LATER.keys())),
    ]


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    return RolloutEngine.from_pretrained(
        tiny_model_path, spec_options={"calibration_seconds": 0.0}, max_running=4, num_threads=1
    )


@pytest.fixture(autouse=True)
def _nobody_is_waited_for(monkeypatch):
    monkeypatch.setattr(call_guard, "_PATIENCE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def expected(engine):
    return tokens(engine.generate(PROMPTS, PARAMS))


@pytest.fixture(autouse=True)
def nothing_is_lost(engine, expected):
    yield
    engine.check_integrity()
    assert not engine.has_unfinished
    assert engine.worker.memory.usage.used == 0
    assert tokens(engine.generate(PROMPTS, PARAMS)) == expected


def tokens(rollouts):
    return [rollout.token_ids for rollout in rollouts]


@contextmanager
def in_a_call(engine: RolloutEngine) -> Iterator[None]:
    """Another thread is inside of a call as long as this lasts."""
    inside, leave = threading.Event(), threading.Event()

    def weights() -> Iterator[tuple[str, object]]:
        inside.set()
        assert leave.wait(HANG_SECONDS)
        raise InterruptedError
        yield

    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(engine.update_weights_from_tensor, weights())
        assert inside.wait(HANG_SECONDS)
        try:
            yield
        finally:
            leave.set()
        with pytest.raises(InterruptedError):
            call.result(HANG_SECONDS)


def test_every_call_says_that_another_thread_is_in_one(engine):
    with in_a_call(engine):
        for call in guarded_calls():
            with pytest.raises(EngineStateError, match=r"another thread.*EngineLoop"):
                call(engine)
    assert not engine.is_paused


def test_a_call_that_ends_soon_is_waited_for(engine, monkeypatch):
    monkeypatch.setattr(call_guard, "_PATIENCE_SECONDS", HANG_SECONDS)
    asked = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        with in_a_call(engine):
            call = threads.submit(lambda: asked.set() or engine.status())
            assert asked.wait(HANG_SECONDS)
        assert call.result(HANG_SECONDS).running == 0


def test_a_loops_thread_waits_for_the_calls_of_others(engine, expected):
    with EngineLoop(engine) as loop:
        with in_a_call(engine):
            tickets = [
                loop.submit(prompt, PARAMS, prompt_index=index)
                for index, prompt in enumerate(PROMPTS)
            ]
            while loop._busy_since is None:
                threading.Event().wait(0.001)
        found = tokens([ticket.future.result(HANG_SECONDS) for ticket in tickets])
    assert found == expected[:: PARAMS.n]


def test_with_several_ranks_an_interrupt_is_not_held_back():
    guard = call_guard.CallGuard(holds_interrupts=False)
    guard.begin_step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    guard.end_step()


def test_a_stream_goes_from_thread_to_thread_and_on_after_a_refusal(engine, expected):
    stream = engine.stream(PROMPTS, PARAMS)
    rollouts = [next(stream)]
    with in_a_call(engine), pytest.raises(EngineStateError, match="another thread"):
        next(stream)
    with ThreadPoolExecutor(1) as other:
        rollouts.append(other.submit(next, stream).result(HANG_SECONDS))
        engine.status()
    assert sorted(tokens([*rollouts, *stream])) == sorted(expected)


@pytest.mark.parametrize("leave", ["close", "collect"])
def test_a_stream_may_be_left_while_another_thread_is_in_a_call(engine, leave):
    streams = [engine.stream(PROMPTS, [SHORT, LONG])]
    next(streams[0])
    with in_a_call(engine):
        if leave == "close":
            streams[0].close()
        streams.clear()
        gc.collect()
        assert engine.has_unfinished  # another thread's call must not lose what it works with
    assert not engine.has_unfinished


def during_a_step(engine: RolloutEngine, patch: pytest.MonkeyPatch, act: Callable[[], object]):
    """From now on ``act`` is called in the middle of each step."""
    step = engine.worker.step

    def acting(batch):
        act()
        return step(batch)

    patch.setattr(engine.worker, "step", acting)


def test_a_signal_handler_is_kept_out_of_a_step(engine, expected, monkeypatch):
    said: list[str] = []

    def handle(*_):
        for call in guarded_calls():
            with pytest.raises(EngineStateError) as caught:
                call(engine)
            said.append(str(caught.value))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patch:
            during_a_step(engine, patch, lambda: signal.raise_signal(signal.SIGUSR1))
            assert tokens(engine.generate(PROMPTS, PARAMS)) == expected
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert said
    assert all("middle of a step" in each for each in said)


def run_out(engine):
    rollouts = []
    while engine.has_unfinished:
        rollouts += engine.step()
    return rollouts


def submit_and_step(engine):
    for index, prompt in enumerate(PROMPTS):
        engine.submit(prompt, PARAMS, prompt_index=index)
    return run_out(engine)


INTERRUPTED = {
    "stream": lambda engine: list(engine.stream(PROMPTS, PARAMS)),
    "score": lambda engine: engine.score(PROMPTS[0], PROMPTS[1]),
    "step": submit_and_step,
}


class InterruptAt:
    """Ctrl-C at the line that is run as the ``number``-th of those that keep the engine's books."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.lines = 0

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        return self._run_line if module.startswith(BOOKKEEPING) else None

    def _run_line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                signal.raise_signal(signal.SIGINT)
        return self._run_line


BOOKKEEPING = ("rollout.scheduler", "rollout.memory", "rollout.engine.engine", "spec_workers")


@pytest.mark.parametrize("name", INTERRUPTED)
def test_an_interrupt_anywhere_leaves_the_books_whole(engine, expected, name):
    call = INTERRUPTED[name]
    with InterruptAt(None) as counted:
        call(engine)
    assert counted.lines > 100
    rng = random.Random(11)
    interrupted = 0
    for _ in range(8):
        try:
            with InterruptAt(rng.randint(1, counted.lines)):
                call(engine)
        except KeyboardInterrupt:
            interrupted += 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if name == "step":  # what was submitted goes on
            for rollout in run_out(engine):
                assert rollout.token_ids == expected[PARAMS.n * rollout.prompt_index]
        assert not engine.has_unfinished
        engine.check_integrity()
    assert interrupted


def test_a_second_interrupt_ends_a_step_that_hangs(engine, monkeypatch):
    def interrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("goes on")

    with monkeypatch.context() as patch:
        during_a_step(engine, patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, PARAMS)


def test_calls_from_inside_of_one_are_fine(engine):
    def weights():
        assert engine.status().running == 0
        raise InterruptedError
        yield

    with pytest.raises(InterruptedError):
        engine.update_weights_from_tensor(weights())
