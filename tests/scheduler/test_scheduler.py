"""One rule of the scheduler per test; test_scheduler_simulation.py checks them all together."""

import numpy as np
import pytest

from rollout.memory.kv_cache_manager import KVCacheManager
from rollout.scheduler import LengthForecast, Scheduler
from rollout.scheduler.step_limits import StepLimits
from rollout.scheduler.waiting import MIN_SHARED
from rollout.types import (
    Batch,
    EntryResult,
    FinishReason,
    Request,
    StepResult,
    TokenExtras,
)
from tests.helpers.requests import NoStopCheck, make_request

EMITTED = 999


class Bench:
    """A scheduler, its memory, and a worker that emits one token of each."""

    def __init__(
        self,
        *,
        slots: int = 1000,
        context: int = 200,
        running: int = 4,
        step_tokens: int = 64,
        chunk: int = 16,
        drafts: int = 0,
        prefix_cache: bool = True,
    ) -> None:
        self.memory = KVCacheManager(slots, running, context, prefix_cache)
        limits = StepLimits(max_running=running, max_step_tokens=step_tokens, chunk_len=chunk)
        self.lengths = LengthForecast()
        self.scheduler = Scheduler(limits, self.memory, lambda: drafts, self.lengths)
        self.submitted = 0

    def request(self, tokens: list[int], max_new_tokens: int = 100) -> Request:
        self.submitted += 1
        return make_request(
            tokens, request_id=self.submitted, group=hash(tuple(tokens)), stop_check=NoStopCheck(),
            max_new_tokens=max_new_tokens,
        )  # fmt: skip

    def add(self, tokens: list[int], max_new_tokens: int = 100) -> Request:
        request = self.request(tokens, max_new_tokens)
        self.scheduler.check_fits(request)
        self.scheduler.add(request)
        return request

    def work(self, batch: Batch, finish: tuple[Request, ...] = ()) -> list[Request]:
        results = [
            EntryResult(
                token_ids=[EMITTED],
                logprobs=[-0.5],
                finish_reason=FinishReason.STOP if entry.request in finish else None,
            )
            if entry.samples
            else EntryResult()
            for entry in batch.entries
        ]
        finished = self.scheduler.commit(batch, StepResult(entries=results, weight_version=0))
        self.memory.check_integrity()
        return finished

    def step(self, finish: tuple[Request, ...] = ()) -> list[tuple[Request, int, int]]:
        batch = self.scheduler.schedule()
        self.memory.check_integrity()
        entries = [(entry.request, entry.start, entry.run_len) for entry in batch.entries]
        self.work(batch, finish)
        return entries


def test_decodes_go_first_then_chunks_then_admissions():
    bench = Bench(step_tokens=20, chunk=16)
    short, long = bench.add([1] * 4), bench.add([2] * 30)
    assert bench.step() == [(short, 0, 4), (long, 0, 16)]
    late = bench.add([3] * 30)
    assert bench.step() == [(short, 4, 1), (long, 16, 14), (late, 0, 5)]
    assert bench.step() == [(short, 5, 1), (long, 30, 1), (late, 5, 16)]
    assert bench.step() == [(short, 6, 1), (long, 31, 1), (late, 21, 9)]
    assert bench.step() == [(short, 7, 1), (long, 32, 1), (late, 30, 1)]


def test_samples_of_one_prompt_prefill_it_once():
    bench = Bench(running=4, chunk=16)
    prompt = list(range(40))
    samples = [bench.add(prompt) for _ in range(4)]
    other = bench.add([7] * 5)
    assert bench.step() == [(samples[0], 0, 16), (other, 0, 5)]
    assert bench.step() == [(other, 5, 1), (samples[0], 16, 16)]
    assert bench.step() == [(other, 6, 1), (samples[0], 32, 8)]
    assert bench.step() == [
        (samples[0], 40, 1),
        (other, 7, 1),
        (samples[1], 39, 1),
        (samples[2], 39, 1),
    ]
    assert [sample.stats.cached_tokens for sample in samples] == [0, 39, 39, 0]
    # 40 prompt slots once, one generated for the leader, three for the other prompt's.
    assert bench.memory.usage.used == 40 + 1 + 5 + 3


def test_samples_do_not_wait_where_prefixes_are_not_kept():
    bench = Bench(prefix_cache=False)
    samples = [bench.add([1] * 10) for _ in range(3)]
    assert bench.step() == [(sample, 0, 10) for sample in samples]


def test_a_sample_waits_no_longer_when_its_leader_is_aborted():
    bench = Bench(chunk=8)
    leader, follower = bench.add([1] * 20), bench.add([1] * 20)
    assert bench.step() == [(leader, 0, 8)]
    bench.scheduler.abort(leader.request_id)
    assert bench.step() == [(follower, 8, 8)]


@pytest.mark.parametrize(("shared", "own", "sharers"), [(100, 20, 8), (200, 100, 8), (60, 7, 32)])
def test_a_prefix_that_requests_share_is_computed_once(shared, own, sharers):
    bench = Bench(slots=9000, context=400, running=sharers, step_tokens=512, chunk=64)
    prompts = [[*range(shared), *range(1000 * k, 1000 * k + own)] for k in range(1, sharers + 1)]
    requests = [bench.add(prompt) for prompt in prompts[: sharers // 2]]
    first = bench.scheduler.schedule()  # the others come while it is being computed
    requests += [bench.add(prompt) for prompt in prompts[sharers // 2 :]]
    needed = shared + sharers * own
    total = first.num_run_tokens
    bench.work(first)
    while any(request.generated_len == 0 for request in requests):
        batch = bench.scheduler.schedule()
        total += sum(e.run_len for e in batch.entries if e.start < e.request.prompt_len)
        bench.work(batch)
    assert needed <= total <= needed + MIN_SHARED
    assert [len(request.tokens) > request.prompt_len for request in requests] == [True] * sharers


def test_requests_that_share_nothing_go_ahead_of_those_that_wait_for_a_prefix():
    bench = Bench(slots=4000, context=400, step_tokens=64, chunk=48)
    leader, follower = (bench.add([*range(90), own]) for own in (500, 501))
    other, alike = bench.add([7] * 10), bench.add([*range(20), *range(600, 640)])
    assert bench.step() == [(leader, 0, 48), (other, 0, 10), (alike, 0, 6)]
    assert bench.step() == [(other, 10, 1), (leader, 48, 43), (alike, 6, 20)]
    assert bench.step() == [(leader, 91, 1), (other, 11, 1), (alike, 26, 34), (follower, 90, 1)]


def test_who_waits_for_a_prefix_goes_on_where_an_aborted_request_stopped():
    bench = Bench(slots=4000, context=400, step_tokens=64, chunk=48)
    leader, follower = (bench.add([*range(90), own]) for own in (500, 501))
    assert bench.step() == [(leader, 0, 48)]
    bench.scheduler.abort(leader.request_id)
    assert bench.step() == [(follower, 48, 43)]


def admission_order(bench: Bench) -> list[Request]:
    """Who is admitted one after another, each ending at its first token."""
    order = []
    while bench.scheduler.has_unfinished:
        batch = bench.scheduler.schedule()
        order += [entry.request for entry in batch.entries if entry.request not in order]
        ended = tuple(entry.request for entry in batch.entries if entry.samples)
        bench.work(batch, finish=ended)
    return order


def test_longest_cached_prefix_is_admitted_first():
    bench = Bench(running=1, chunk=32)
    seen = list(range(20))
    bench.step(finish=(bench.add(seen),))
    cold, warm, warmer = bench.add([50] * 9), bench.add([*seen[:5], 60]), bench.add([*seen, 70])
    colder = bench.add([51] * 9)
    assert admission_order(bench) == [warmer, warm, cold, colder]


def test_a_request_is_not_expected_to_pass_its_limit_which_alone_ranks_nobody():
    bench = Bench(running=1, chunk=32)
    limited, long = bench.add([1] * 9, max_new_tokens=3), bench.add([2] * 9)
    assert admission_order(bench) == [limited, long]
    limited, long = bench.add([1] * 9, max_new_tokens=3), bench.add([2] * 9)
    bench.lengths.observe(limited.group, 90)
    bench.lengths.observe(long.group, 20)
    assert admission_order(bench) == [long, limited]


def test_samples_of_the_longest_prompt_wait_for_its_prefill_and_come_next():
    bench = Bench(running=2, chunk=8)
    short = [bench.add([1] * 4) for _ in range(2)]
    long = [bench.add([2] * 20) for _ in range(3)]
    bench.lengths.observe(short[0].group, 5)
    bench.lengths.observe(long[0].group, 50)
    assert bench.step() == [(long[0], 0, 8), (short[0], 0, 4)]
    bench.step(finish=(short[0],))
    assert bench.step() == [(long[0], 16, 4), (short[1], 3, 1)], "another one runs in its place"
    bench.step(finish=(short[1],))
    assert bench.step() == [(long[0], 21, 1), (long[1], 19, 1)]


def test_rollouts_that_ended_by_themselves_teach_lengths_and_broken_ones_are_not_cached():
    bench = Bench(running=4)
    stopped, limited = bench.add([1, 1]), bench.add([2, 2], max_new_tokens=2)
    failed, aborted = bench.add([3, 3]), bench.add([4, 4])
    bench.step()
    batch = bench.scheduler.schedule()
    reasons = {
        stopped: FinishReason.STOP,
        limited: FinishReason.LENGTH,
        failed: FinishReason.ERROR,
    }
    results = [
        EntryResult(token_ids=[7], logprobs=[0.0], finish_reason=reasons.get(entry.request))
        for entry in batch.entries
    ]
    bench.scheduler.commit(batch, StepResult(entries=results, weight_version=0))
    bench.scheduler.abort(aborted.request_id)
    assert bench.lengths.learned() == {
        "recent": [2, 4],  # what was cut is taken for half-way
        "groups": {str(stopped.group): [2], str(limited.group): [4]},
    }
    requests = (stopped, limited, failed, aborted)
    cached = [bench.memory.cached_len(np.array(r.tokens, dtype=np.int32)) for r in requests]
    assert cached == [3, 3, 2, 3], "of the failed one its prompt, which was shared before"
    bench.memory.check_integrity()


def test_admission_waits_for_memory_for_the_whole_prompt():
    bench = Bench(slots=80, chunk=16, step_tokens=64)
    first, second = bench.add([1] * 40), bench.add([2] * 40)
    assert bench.step() == [(first, 0, 16)]
    assert list(bench.scheduler.waiting) == [second]
    while first in bench.scheduler.running:
        bench.step(finish=(first,))
    assert bench.step() == [(second, 0, 16)]


def test_the_youngest_is_preempted_and_comes_back_first():
    bench = Bench(slots=80, running=2)
    old, young = bench.add([1] * 20), bench.add([2] * 20)
    late = bench.add([3] * 3)
    while young.row >= 0 or not young.token_ids:
        bench.step()
    assert young.stats.preemptions == 1
    assert old.stats.preemptions == 0
    assert bench.scheduler.waiting[:2] == (young, late)
    kept = list(young.token_ids)
    assert kept == [EMITTED] * len(young.logprobs)
    assert young.computed_len == 0
    while young.row < 0:
        bench.step(finish=(old,))
    assert young.token_ids[: len(kept)] == kept
    assert young.computed_len > 20, "its KV was still cached"
    assert young.stats.cached_tokens == 0, "counted at first admission"


def test_a_retracted_request_is_next_whatever_is_cached_and_however_short():
    bench = Bench(running=1, chunk=32)
    seen = list(range(20))
    bench.step(finish=(bench.add(seen),))
    request = bench.add([50] * 9)
    bench.step()
    cached = bench.add([*seen, 1])
    for _ in range(8):
        bench.lengths.observe(request.group, 2)
        bench.lengths.observe(cached.group, 90)
    bench.scheduler.retract_all()
    assert bench.step() == [(request, 9, 1)]


def test_results_are_appended_with_their_weight_version():
    bench = Bench()
    request = bench.add([1])
    for version in (3, 4):
        output = EntryResult(
            token_ids=[7], logprobs=[-1.0], extras=TokenExtras(raw_logprobs=[-2.0], entropies=[0.1])
        )
        batch = bench.scheduler.schedule()
        bench.scheduler.commit(batch, StepResult(entries=[output], weight_version=version))
    assert request.weight_versions == [3, 4]
    assert request.extras.raw_logprobs == [-2.0, -2.0]
    assert request.extras.entropies == [0.1, 0.1]
    assert request.extras.top_logprobs == []


def test_draft_slots_go_to_runs_that_are_sampled_from():
    bench = Bench(drafts=5, chunk=16)
    bench.add([1] * 4)
    bench.add([2] * 30)
    bench.add([3] * 4, max_new_tokens=3)
    batch = bench.scheduler.schedule()
    assert [len(entry.draft_slots) for entry in batch.entries] == [5, 0, 2]
    bench = Bench(slots=40, drafts=63, running=3)
    for token in (1, 2, 3):
        bench.add([token])
    batch = bench.scheduler.schedule()
    # Where they are scarce, evenly: a quarter of forty, over three.
    assert [len(entry.draft_slots) for entry in batch.entries] == [3, 3, 3]


def test_retracted_samples_share_their_prompt_again():
    bench = Bench(chunk=8)
    prompt = list(range(20))
    leader, follower = bench.add(prompt), bench.add(prompt)
    while len(follower.token_ids) < 2:
        bench.step()
    bench.scheduler.retract_all()
    bench.memory.reset()
    follower_starts = [start for _ in range(6) for r, start, _ in bench.step() if r is follower]
    assert follower_starts[0] == 20
    assert leader.tokens[:20] == prompt


def test_a_batch_says_whether_requests_wait_and_what_the_running_ones_have_left():
    bench = Bench(running=2, context=60)
    first, second = bench.add([1, 2], 9), bench.add([3, 4], 90)
    waiting = bench.add([5, 6], 9)
    assert bench.scheduler.schedule().tail is None
    bench.scheduler.abort(waiting.request_id)
    tail = bench.scheduler.schedule().tail
    assert tail.remaining(first).limit == 9
    assert tail.remaining(second).limit == 60 - 2  # the context ends it
    assert tail.remaining(first).expected > 1000, "nothing is known"
    for _ in range(3):
        bench.lengths.observe(first.group, 30)
    bench.step()
    assert bench.scheduler.schedule().tail.remaining(first) == (29, 8)


def test_a_batch_says_whether_requests_that_end_are_replaced():
    bench = Bench(running=2)

    def replaced() -> float:
        return bench.scheduler.schedule().tail.replaced

    first, second = bench.add([1, 2]), bench.add([3, 4])
    assert replaced() == 0.0
    for _ in range(20):  # a client with two requests in flight
        bench.step(finish=(first,))
        first, second = second, bench.add([1, 2])
    assert replaced() > 0.9
    bench.step(finish=(first, second))
    for _ in range(40):  # requests that are submitted together and end one after the other
        first, second = bench.add([1, 2]), bench.add([3, 4])
        bench.step(finish=(first,))
        bench.step(finish=(second,))
    assert bench.add([1, 2]) is not None
    assert replaced() < 0.1
