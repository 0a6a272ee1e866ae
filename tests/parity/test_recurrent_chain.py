"""The parity chain on targets with recurrent layers, bit for bit on tokens and logprobs.

Where a state came from cannot be seen: from a run or from steps, from chunks, from a checkpoint of
the prefix cache, from a node of a draft tree, from before a preemption or computed again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import RolloutEngine, SamplingParams
from rollout.errors import OutOfMemoryError
from rollout.overrides import engine_config
from tests.helpers.branch_watch import BranchWatch
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_hybrid import save_tiny_chain, save_tiny_hybrid

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=18, n=1),
    "sampled": SamplingParams(temperature=0.8, max_new_tokens=18, n=2, seed=5),
    "shaped": SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1,
        min_new_tokens=8, max_new_tokens=18, seed=6, raw_logprobs=True, entropy=True,
    ),
}  # fmt: skip
FIXED = {"budget": "fixed", "min_probability": 0.0}
SPECS = {
    "none": {},
    "ngram": {"num_draft_tokens": 12, "min_probability": 0.0, "calibration_seconds": 0},
    "ngram, fixed": FIXED | {"num_draft_tokens": 12},
    "eagle": FIXED | {"topk": 4, "num_draft_tokens": 12},
    "mtp": FIXED | {"topk": 3, "num_steps": 3, "num_draft_tokens": 9},
    "hybrid": FIXED | {"calibration_seconds": 0},
}
SCARCE = {"max_kv_tokens": 150, "state_slots": 9, "state_interval": 4}


def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    shared = random.integers(3, 97, 40).tolist()
    own = [random.integers(3, 97, length).tolist() for length in (1, 5, 70)]
    return [*own, shared, [*shared, 7], [*shared[:20], *own[1]]]


def numbers(rollouts):
    return [
        (r.prompt_index, r.sample_index, r.token_ids, r.logprobs, r.finish_reason, r.extras)
        for r in rollouts
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder, whose checkpoint has an MTP head too, and a dtype."""
    folder = tmp_path_factory.mktemp("qwen3_next")
    save_tiny_chain(folder, "qwen3_next")
    return str(folder), "bfloat16"


@pytest.fixture(scope="module")
def eagle3(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle3")
    path, _ = target
    return str(save_tiny_eagle3(folder, Path(path), draft_vocab_size=64, unsorted=True))


@pytest.fixture(scope="module")
def plain(target):
    """Plain decoding, one request at a time, no prefix cache: what every other run must equal."""
    engine = make_engine(target, "none", max_running=1, prefix_cache=False)
    return {name: engine.generate(prompts(), params) for name, params in PARAMS.items()}


def make_engine(target, spec, draft=None, **options) -> RolloutEngine:
    path, dtype = target
    spec_options = SPECS[spec] | ({"draft_path": draft} if draft else {})
    return RolloutEngine.from_pretrained(
        path, spec.partition(",")[0], dtype=dtype, spec_options=spec_options, **options
    )


def compare(engine, plain, name):
    rollouts = engine.generate(prompts(), PARAMS[name])
    assert numbers(rollouts) == numbers(plain[name])
    engine.check_integrity()
    assert engine.worker.memory.usage.used == 0
    assert engine.worker.counters()["states/used"] == 0
    return rollouts


@pytest.mark.parametrize(
    "options",
    [
        {"max_running": 3},
        {"max_running": 8, "prefix_cache": False},
        {"max_running": 5, "chunk_len": 7, "max_step_tokens": 24, "state_interval": 10},
        {"max_running": 8, "chunk_len": 1},
        {"max_running": 8} | SCARCE,
        {"max_running": 8, "state_slots": 2, "state_interval": 16},
        {"max_running": 8, "num_threads": 2},
    ],
    ids=str,
)
def test_company_chunks_cache_and_preemption_cannot_be_seen(target, plain, options):
    threads = torch.get_num_threads()
    try:
        engine = make_engine(target, "none", **options)
        preempted = 0
        for name in ("sampled", "greedy", "shaped"):
            rollouts = compare(engine, plain, name)
            preempted += sum(r.stats.preemptions for r in rollouts)
    finally:
        torch.set_num_threads(threads)
    if "max_kv_tokens" in options:
        assert preempted > 0, "the test must force preemption"
        assert engine.worker.counters()["states/evicted"] > 0
    has_checkpoints = options.get("prefix_cache", True) and options.get("state_slots") != 2
    assert (engine.worker.memory.counters.hit > 0) == has_checkpoints


def compare_trees(target, plain, name, right, options):
    """Branching trees: a node reads its parent's state, and none of its siblings'."""
    path, dtype = target
    known = {(r.prompt_index, r.sample_index): r.prompt_ids + r.token_ids for r in plain[name]}
    config = engine_config(path, {"dtype": dtype, "max_running": 5} | options)
    factory = oracle_factory(known, size=20, right=right, chain=False)
    engine = RolloutEngine.from_config(config, factory)
    watch = BranchWatch(engine)
    rollouts = compare(engine, plain, name)
    assert watch.branched > 0
    assert sum(r.stats.accepted for r in rollouts) > 0
    assert watch.later_children > 0 or right == 1.0


@pytest.mark.parametrize("name", ["sampled", "greedy"])
@pytest.mark.parametrize("right", [0.6, 1.0])
@pytest.mark.parametrize("scarce", [False, True], ids=["ample", "scarce"])
def test_no_tree_can_be_seen(target, plain, name, right, scarce):
    options = SCARCE | {"chunk_len": 9, "state_slots": 24} if scarce else {}
    compare_trees(target, plain, name, right, options)


def test_no_tree_can_be_seen_in_the_other_family(tmp_path):
    target = str(save_tiny_hybrid(tmp_path)), "float32"
    engine = make_engine(target, "none", max_running=1, prefix_cache=False)
    plain = {"sampled": engine.generate(prompts(), PARAMS["sampled"])}
    options = {"chunk_len": 7, "state_interval": 10, "state_slots": 40}
    compare_trees(target, plain, "sampled", 0.6, options)


@pytest.mark.parametrize("spec", ["ngram", "ngram, fixed", "eagle", "mtp", "hybrid"])
@pytest.mark.parametrize("options", [{"max_running": 3, "chunk_len": 7}, SCARCE], ids=str)
def test_no_worker_can_be_seen(target, eagle3, plain, spec, options):
    draft = eagle3 if spec in ("eagle", "hybrid") else None
    engine = make_engine(target, spec, draft, **options)
    watch = BranchWatch(engine)
    for name in ("greedy", "sampled", "sampled"):  # a corpus knows the last ones
        rollouts = compare(engine, plain, name)
    if options is not SCARCE and spec != "ngram":  # whose budget may find that nothing pays
        assert watch.branched > 0
        assert watch.later_children > 0
        assert sum(r.stats.accepted for r in rollouts) > 0


def test_score_is_what_generation_reported(target, plain):
    engine = make_engine(target, "none", chunk_len=19, max_running=2, state_interval=8)
    for name in PARAMS:
        for rollout in plain[name]:
            scored = engine.score(rollout.prompt_ids, rollout.token_ids, PARAMS[name])
            assert scored == rollout.logprobs
    engine.check_integrity()
    assert engine.worker.memory.counters.hit > 0


def test_scoring_needs_the_states_of_one_request(target, plain):
    engine = make_engine(target, "none", max_running=4, state_slots=4)
    rollout = plain["greedy"][1]
    for prompt in prompts()[2:4]:
        engine.submit(prompt, PARAMS["greedy"])
    engine.step()
    with pytest.raises(OutOfMemoryError, match=r"all 4 state slots; raise memory\.state_slots"):
        engine.score(rollout.prompt_ids, rollout.token_ids)
    while engine.has_unfinished:
        engine.step()
    scored = engine.score(rollout.prompt_ids, rollout.token_ids, PARAMS["greedy"])
    assert scored == rollout.logprobs


@pytest.mark.parametrize("spec", ["none", "ngram"])
def test_a_rollout_cut_anywhere_goes_on_as_if_it_had_not_been(target, plain, spec):
    engine = make_engine(target, spec, max_running=4, state_interval=16)
    wanted = {}
    for rollout in plain["sampled"][::2]:
        last = len(rollout.token_ids) - 1
        for cut in {0, min(1, last), last // 2, last}:
            request = engine.submit(
                rollout.prompt_ids,
                PARAMS["sampled"],
                request_seed=rollout.seed,
                partial_ids=rollout.token_ids[:cut],
            )
            wanted[request.request_id] = (rollout.token_ids[cut:], rollout.logprobs[cut:])
    while engine.has_unfinished:
        for rollout in engine.step():
            assert (rollout.token_ids, rollout.logprobs) == wanted.pop(rollout.request_id)
    assert not wanted


DISTURBANCES = {
    "retract": lambda engine: engine.pause_generation("retract"),
    "in_place": lambda engine: engine.pause_generation("in_place"),
    "flush": lambda engine: engine.flush_cache(),
    "sleep": lambda engine: (engine.release_memory(), engine.resume_memory()),
    "score": lambda engine: engine.score(prompts()[4], [5, 6, 7]),
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_nothing_between_steps_can_be_seen(target, plain, name):
    """With prefixes in the cache and requests in the middle of prefills and answers."""
    engine = make_engine(target, "ngram", max_running=4, chunk_len=9, state_interval=8)
    requests = {}
    for rollout in plain["sampled"]:
        request = engine.submit(rollout.prompt_ids, PARAMS["sampled"], request_seed=rollout.seed)
        requests[request.request_id] = rollout
    steps = 0
    while engine.has_unfinished:
        if steps in (3, 7, 12, 18):
            DISTURBANCES[name](engine)
            engine.continue_generation()
            engine.check_integrity()
        for rollout in engine.step():
            expected = requests.pop(rollout.request_id)
            assert (rollout.token_ids, rollout.logprobs) == (expected.token_ids, expected.logprobs)
        steps += 1
    assert not requests
    assert steps > 10


def test_a_step_that_fails_after_its_commit_is_run_again(target, plain):
    """The states it began with are there until it is booked."""
    engine = make_engine(target, "ngram", max_running=4, chunk_len=9, state_interval=8)
    observe, calls = engine.worker.observe, 0

    def fail_now_and_then(step):
        nonlocal calls
        calls += 1
        if calls % 4 == 3:
            raise RuntimeError("after the commit")
        observe(step)

    engine.worker.observe = fail_now_and_then
    wanted = {}
    for rollout in plain["greedy"]:
        request = engine.submit(rollout.prompt_ids, PARAMS["greedy"], request_seed=rollout.seed)
        wanted[request.request_id] = rollout
    while engine.has_unfinished:
        try:
            ended = engine.step()
        except RuntimeError:
            engine.check_integrity()
            continue
        for rollout in ended:
            expected = wanted.pop(rollout.request_id)
            assert (rollout.token_ids, rollout.logprobs) == (expected.token_ids, expected.logprobs)
    assert not wanted
    assert calls > 10


def test_nothing_stays_reserved_for_requests_that_are_aborted_after_a_step_that_failed(target):
    engine = make_engine(target, "none", max_running=2)
    request = engine.submit(prompts()[2], PARAMS["greedy"])

    def fail(batch, results):
        raise RuntimeError("at its commit")

    engine.worker.target.commit = fail
    with pytest.raises(RuntimeError):
        engine.step()
    engine.abort(request.request_id)
    engine.check_integrity()
    assert engine.worker.counters()["states/used"] == 0


def test_states_come_and_go_with_the_kv_cache(target):
    engine = make_engine(target, "none", max_running=2)
    pool = engine.worker.target.state_pool
    size = sum(t.numel() * t.itemsize for t in pool.convolutions + pool.recurrent)
    each = pool.bytes_per_slot(
        engine.worker.target.model.spec.linear_attention, pool.convolutions[0].dtype
    )
    assert size == (pool.num_slots + 1) * each
    freed = engine.release_memory(["kv_cache"])["kv_cache"]
    kv = engine.worker.target.kv_pool
    assert freed == size + sum(t.numel() * t.itemsize for t in kv.keys + kv.values)
    engine.resume_memory()
    for tensor in pool.convolutions + pool.recurrent:
        assert not tensor[0].any()
