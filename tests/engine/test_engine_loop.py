"""The engine on a thread of its own: nothing lost, nothing left, and the tokens of plain calls."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import pytest
import torch

from rollout import FinishReason, RolloutEngine, SamplingParams
from rollout.engine.engine_loop import EngineLoop
from rollout.errors import EngineStateError, InvalidInputError, ParallelError, WeightUpdateError
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import held

PROMPT = [5, 6, 7]
LONG = SamplingParams(temperature=0.9, max_new_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0.9, max_new_tokens=8, ignore_eos=True)


@pytest.fixture
def engine(tiny_model_path):
    return RolloutEngine.from_pretrained(tiny_model_path, max_running=4)


@pytest.fixture
def loop(engine):
    with EngineLoop(engine) as loop:
        yield loop
    assert engine.worker.memory.usage.used == 0
    assert not engine.has_unfinished


class Gate:
    """Holds the loop inside a call, so that a test decides what is asked before the next step."""

    def __init__(self, loop: EngineLoop) -> None:
        self.entered, self._opened = threading.Event(), threading.Event()
        self.future = loop.call(self._wait)
        assert self.entered.wait(HANG_SECONDS)

    def _wait(self, engine: RolloutEngine) -> None:
        self.entered.set()
        assert self._opened.wait(HANG_SECONDS)

    def open(self) -> None:
        self._opened.set()


def step_until(loop: EngineLoop, reached) -> None:
    """Let the loop run until ``reached(engine)`` holds between two steps."""
    wait_until(lambda: loop.call(reached).result(HANG_SECONDS))


def weights_of(engine: RolloutEngine) -> list[tuple[str, torch.Tensor]]:
    weight_loaders = engine.worker.target.model.weight_loaders()
    return [(name, loader.read()) for name, loader in weight_loaders.items()]


def test_requests_of_eight_threads_get_the_tokens_of_generate(engine):
    prompts = [[3 + i % 7, 10 + i, 11, 3 + i % 5] for i in range(12)]
    params = SamplingParams(temperature=0.9, max_new_tokens=12, seed=3, n=4)
    expected = {
        (r.prompt_index, r.sample_index): (r.token_ids, r.logprobs, r.finish_reason, r.seed)
        for r in engine.generate(prompts, params)
    }
    jobs = [(p, s) for p in range(12) for s in range(4)]
    random.Random(0).shuffle(jobs)

    def run(job):
        ticket = loop.submit(prompts[job[0]], params, prompt_index=job[0], sample_index=job[1])
        return job, ticket.future.result(HANG_SECONDS)

    with EngineLoop(engine) as loop, ThreadPoolExecutor(8) as pool:
        found = dict(pool.map(run, jobs))
    assert {
        job: (r.token_ids, r.logprobs, r.finish_reason, r.seed) for job, r in found.items()
    } == expected
    assert not engine.has_unfinished


def test_bad_input_is_the_tickets_own_error(loop):
    good = loop.submit(PROMPT, SHORT)
    bad = [
        loop.submit([10**6], SHORT),
        loop.submit(PROMPT, SHORT, request_seed=2**64),
        loop.submit(None, SHORT),  # not even iterable
    ]
    for ticket in bad:
        with pytest.raises((InvalidInputError, TypeError)):
            ticket.future.result(HANG_SECONDS)
        assert ticket.request_id is None
        ticket.abort()
    assert len(good.future.result(HANG_SECONDS).token_ids) == 8
    assert good.request_id is not None
    assert loop.num_unfinished == 0


def test_abort_of_a_request_that_is_asked_for_waiting_running_and_ended(loop, engine):
    gate = Gate(loop)
    asked = loop.submit(PROMPT, LONG)
    asked.abort()
    running = [loop.submit([10 + i, *PROMPT], LONG) for i in range(4)]
    waiting = loop.submit(PROMPT, LONG)
    assert loop.num_unfinished == 6
    with held(loop):
        gate.open()
        cut = asked.future.result(HANG_SECONDS)
        assert (cut.finish_reason, cut.token_ids) == (FinishReason.ABORT, [])
        step_until(loop, lambda e: e.scheduler.num_running == 4 and e.metrics().steps > 3)
        waiting.abort()
        assert waiting.future.result(HANG_SECONDS).token_ids == []
        running[0].abort()
        cut = running[0].future.result(HANG_SECONDS)
    assert cut.finish_reason is FinishReason.ABORT
    assert 0 < len(cut.token_ids) == len(cut.logprobs) < 400
    done = [ticket.future.result(HANG_SECONDS) for ticket in running[1:]]
    assert {r.finish_reason for r in done} == {FinishReason.LENGTH}
    running[1].abort()  # ended long ago
    assert loop.call(lambda e: e.has_unfinished).result(HANG_SECONDS) is False


def test_abort_all_settles_every_future_before_its_own(loop):
    with held(loop):
        tickets = [loop.submit([10 + i], LONG) for i in range(9)]
        assert loop.abort_all().result(HANG_SECONDS) == 9
    assert all(ticket.future.done() for ticket in tickets)
    assert {ticket.future.result().finish_reason for ticket in tickets} == {FinishReason.ABORT}
    assert loop.abort_all().result(HANG_SECONDS) == 0
    assert loop.num_unfinished == 0


def test_requests_that_are_held_back_come_in_at_the_end_in_their_order(loop):
    running = loop.submit(PROMPT, SHORT)
    with loop.holding() as unfinished:
        assert set(unfinished) <= {running}
        held = [loop.submit(PROMPT, SHORT) for _ in range(3)]
        held[0].abort()
        held[1].future.cancel()
        expected = running.future.result(HANG_SECONDS).token_ids
        assert loop.num_unfinished == 3
        with loop.holding() as unfinished:  # as two calls may
            assert set(unfinished) == set(held)
        assert not loop.call(lambda engine: engine.has_unfinished).result(HANG_SECONDS)
    assert held[2].future.result(HANG_SECONDS).token_ids == expected
    assert held[0].future.result(HANG_SECONDS).finish_reason is FinishReason.ABORT
    wait_until(lambda: not loop.num_unfinished)


def test_a_loop_that_is_closed_ends_what_it_holds_back(engine):
    with EngineLoop(engine) as loop, loop.holding():
        handle = loop.submit(PROMPT, LONG)
        loop.close()
        assert handle.future.result(HANG_SECONDS).finish_reason is FinishReason.ABORT


def test_calls_run_in_order_on_one_thread_and_their_errors_are_nobody_elses(loop):
    seen: list[int] = []
    ticket = loop.submit(PROMPT, LONG)
    calls = [loop.call(lambda _, i=i: seen.append(i) or threading.get_ident()) for i in range(20)]
    (thread,) = {call.result(HANG_SECONDS) for call in calls}
    assert seen == list(range(20))
    assert thread != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda _: 1 / 0).result(HANG_SECONDS)
    with pytest.raises(SystemExit):
        loop.call(lambda _: sys.exit(3)).result(HANG_SECONDS)
    assert len(ticket.future.result(HANG_SECONDS).token_ids) == 400


def test_calls_are_not_held_up_where_no_step_can_run(loop):
    loop.call(lambda engine: engine.pause_generation("in_place")).result(HANG_SECONDS)
    ticket = loop.submit(PROMPT, SHORT)
    wait([loop.call(lambda _: time.sleep(0.005)) for _ in range(20)])
    assert not ticket.future.done()
    loop.call(lambda engine: engine.continue_generation()).result(HANG_SECONDS)
    assert len(ticket.future.result(HANG_SECONDS).token_ids) == 8


def test_a_cancelled_waiter_aborts_its_request_and_frees_its_slots(loop):
    async def give_up():
        waiters = [asyncio.wrap_future(loop.submit([10 + i], LONG).future) for i in range(2)]
        step_until(loop, lambda e: e.worker.memory.usage.used > 0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(waiters[0], timeout=0.001)
        waiters[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiters[1]

    with held(loop):
        asyncio.run(give_up())
    assert loop.call(lambda e: e.has_unfinished).result(HANG_SECONDS) is False
    assert loop.num_unfinished == 0


def test_what_is_cancelled_before_its_turn_never_runs(loop):
    gate, ran = Gate(loop), []
    call, ticket = loop.call(lambda _: ran.append(1)), loop.submit(PROMPT, LONG)
    assert call.cancel()
    assert ticket.future.cancel()
    gate.open()
    assert loop.call(lambda e: e.metrics().steps).result(HANG_SECONDS) == 0
    assert ran == []
    with pytest.raises(CancelledError):
        ticket.future.result(HANG_SECONDS)


def test_submits_aborts_and_cancels_may_race(loop):
    """Every future is settled; the fixture finds slots that leaked."""
    ends: list[Future] = []

    def worker(seed):
        choices = random.Random(seed)
        for _ in range(20):
            params = SamplingParams(max_new_tokens=choices.randrange(1, 30), ignore_eos=True)
            ticket = loop.submit([choices.randrange(3, 90)], params)
            ends.append(ticket.future)
            time.sleep(choices.random() * 2e-3)
            if choices.random() < 0.5:
                ticket.abort()
            if choices.random() < 0.5:
                ticket.future.cancel()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(worker, range(4)))
    assert not wait(ends, HANG_SECONDS).not_done
    assert len(ends) == 80
    wait_until(lambda: not loop.num_unfinished)


def test_it_sleeps_while_there_is_nothing_to_do_and_wakes_at_once(loop):
    loop.submit(PROMPT, SHORT).future.result(HANG_SECONDS)
    before = loop.call(lambda _: time.thread_time()).result(HANG_SECONDS)
    time.sleep(0.2)
    assert loop.call(lambda _: time.thread_time()).result(HANG_SECONDS) - before < 0.05
    for _ in range(100):  # a lost wake-up would hang one of these
        loop.call(lambda _: None).result(HANG_SECONDS)


def test_requests_wait_while_the_weights_are_torn(loop, engine):
    whole = weights_of(engine)
    expected = loop.submit(PROMPT, SHORT).future.result(HANG_SECONDS).token_ids

    def broken():
        yield whole[0]
        raise ConnectionError("the trainer is gone")

    gate = Gate(loop)
    torn = loop.call(lambda e: e.update_weights_from_tensor(broken()))
    ticket, aborted = loop.submit(PROMPT, SHORT), loop.submit(PROMPT, SHORT)
    gate.open()
    with pytest.raises(ConnectionError):
        torn.result(HANG_SECONDS)
    before = loop.call(lambda _: time.thread_time()).result(HANG_SECONDS)
    time.sleep(0.2)
    assert loop.call(lambda _: time.thread_time()).result(HANG_SECONDS) - before < 0.05
    aborted.abort()
    assert aborted.future.result(HANG_SECONDS).finish_reason is FinishReason.ABORT
    assert not ticket.future.done()
    with pytest.raises((WeightUpdateError, EngineStateError)):
        loop.call(lambda e: e.score(PROMPT, [4])).result(HANG_SECONDS)
    loop.call(lambda e: e.update_weights_from_tensor(whole)).result(HANG_SECONDS)
    assert ticket.future.result(HANG_SECONDS).token_ids == expected


def test_a_pause_keeps_requests_waiting_and_what_it_aborts_comes_at_once(loop):
    expected = loop.submit(PROMPT, SHORT).future.result(HANG_SECONDS).token_ids
    with held(loop):
        running = loop.submit(PROMPT, LONG)
        loop.call(lambda e: e.pause_generation("abort")).result(HANG_SECONDS)
    assert running.future.result(HANG_SECONDS).finish_reason is FinishReason.ABORT
    tickets = [loop.submit(PROMPT, SHORT) for _ in range(2)]
    steps = loop.call(lambda e: e.metrics().steps).result(HANG_SECONDS)
    tickets[0].abort()
    assert tickets[0].future.result(HANG_SECONDS).token_ids == []
    time.sleep(0.05)
    assert loop.call(lambda e: e.metrics().steps).result(HANG_SECONDS) == steps
    assert loop.num_unfinished == 1
    with pytest.raises(EngineStateError, match="paused"):
        loop.call(lambda e: e.generate([PROMPT], SHORT)).result(HANG_SECONDS)
    loop.call(lambda e: e.continue_generation()).result(HANG_SECONDS)
    assert tickets[1].future.result(HANG_SECONDS).token_ids == expected


def test_a_step_that_raises_breaks_the_loop_and_says_why(engine, monkeypatch):
    loop = EngineLoop(engine)
    gate = Gate(loop)
    tickets = [loop.submit([10 + i], LONG) for i in range(6)]
    step, calls = engine.worker.step, []

    def faulty(batch):
        if len(calls) == 3:
            loop.call(lambda _: None).add_done_callback(calls.append)
            raise RuntimeError("the device is lost")
        calls.append(None)
        return step(batch)

    monkeypatch.setattr(engine.worker, "step", faulty)
    gate.open()
    for ticket in tickets:
        with pytest.raises(EngineStateError, match="the device is lost") as caught:
            ticket.future.result(HANG_SECONDS)
        assert isinstance(caught.value.__cause__, RuntimeError)
    for late in (lambda: loop.submit(PROMPT, SHORT), lambda: loop.call(lambda _: None)):
        with pytest.raises(EngineStateError, match="the device is lost"):
            late()
    tickets[0].abort()
    loop.close()
    assert isinstance(calls[-1].exception(), EngineStateError)  # the call that was still queued
    assert loop.num_unfinished == 0
    assert not engine.has_unfinished
    monkeypatch.undo()
    assert len(engine.generate([PROMPT], SHORT)[0].token_ids) == 8


@pytest.mark.parametrize("by", ["call", "submit"])
def test_a_lost_rank_breaks_the_loop_and_is_no_fault_of_a_request(engine, monkeypatch, by):
    def lose(*arguments, **options):
        raise ParallelError("rank 1 is gone")

    monkeypatch.setattr(engine, "submit", lose)
    with EngineLoop(engine) as loop:
        if by == "call":
            assert isinstance(loop.call(lose).exception(HANG_SECONDS), ParallelError)
        else:
            error = loop.submit(PROMPT, SHORT).future.exception(HANG_SECONDS)
            assert isinstance(error, EngineStateError)
        loop.broken.result(HANG_SECONDS)
        with pytest.raises(EngineStateError, match="rank 1 is gone"):
            loop.submit(PROMPT, SHORT)


def test_close_does_what_was_asked_and_aborts_what_is_unfinished(engine):
    loop = EngineLoop(engine)
    gate = Gate(loop)
    called, tickets = loop.call(lambda _: 5), [loop.submit([10 + i], LONG) for i in range(6)]
    closing = threading.Thread(target=loop.close)
    closing.start()
    gate.open()
    closing.join(HANG_SECONDS)
    assert called.result(0) == 5
    assert {t.future.result(0).finish_reason for t in tickets} == {FinishReason.ABORT}
    with pytest.raises(EngineStateError, match="closed"):
        loop.submit(PROMPT, SHORT)
    tickets[0].abort()
    loop.close()
    with EngineLoop(engine) as again:  # the engine is whole
        assert len(again.submit(PROMPT, SHORT).future.result(HANG_SECONDS).token_ids) == 8


def test_a_listener_is_told_of_every_token_once_and_in_order(loop):
    told: list[list[int]] = [[] for _ in range(6)]
    logprobs: list[list[float]] = [[] for _ in range(6)]

    def listener(index):
        def on_tokens(request, first):
            assert first == len(told[index])
            told[index] += request.token_ids[first:]
            logprobs[index] += request.logprobs[first:]

        return on_tokens

    with held(loop):
        tickets = [
            loop.submit(PROMPT, SHORT, sample_index=i, on_tokens=listener(i)) for i in range(5)
        ]
        tickets.append(loop.submit(PROMPT, LONG, on_tokens=listener(5)))
        step_until(loop, lambda _: len(told[5]) > 3)
        tickets[5].abort()
    for index, ticket in enumerate(tickets):
        rollout = ticket.future.result(HANG_SECONDS)
        assert (told[index], logprobs[index]) == (rollout.token_ids, rollout.logprobs)
