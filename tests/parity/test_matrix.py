"""The parity matrix: whatever runs beside, before or between, tokens and logprobs are bit for bit
those of plain decoding, one request at a time.

A batch of m is a batch of n; chunked prefill is prefill; decode is prefill; verify is decode;
speculation on is off; `score` gives what generation gave; and neither preemption, prefix cache,
recurrent state, threads, overlap nor what happens between two steps can be seen. Each row is an
engine of one value of each factor; any two values that can meet do so in some row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollout import Rollout, RolloutEngine, SamplingParams
from rollout.errors import OutOfMemoryError
from rollout.overrides import engine_config
from rollout.types import Request
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.pairwise import PairwiseDesign, Row
from tests.helpers.parity_models import MODELS, PARAMS, RECURRENT, SPARSE, ParityModels, prompts
from tests.helpers.step_watch import StepWatch

WORKERS: dict[str, tuple[str, str | None, dict]] = {  # spec, kind of draft, options
    "none": ("none", None, {}),
    "ngram": ("ngram", None, {"num_draft_tokens": 12}),
    "eagle": ("eagle", "eagle", {"topk": 1}),
    "eagle3": ("eagle", "eagle3", {"num_draft_tokens": 63}),
    "eagle lockstep": ("eagle", "eagle3", {"lockstep": True, "num_steps": 2, "topk": 8}),
    "mtp": ("mtp", "mtp", {"topk": 3, "num_steps": 3, "num_draft_tokens": 24}),
    "mtp lockstep": ("mtp", "mtp", {"lockstep": True}),
    "hybrid": ("hybrid", "eagle3", {}),
    "hybrid mtp": ("hybrid", "mtp", {"topk": 2}),
}
ORACLES = {
    "oracle chain": {"chain": True, "right": 1.0},
    "oracle tree": {"chain": False, "right": 0.6},
    "wrong tree": {"chain": False, "right": 0.0},
}
BUDGETS = {
    "fixed": {"budget": "fixed", "min_probability": 0.0},
    "learned": {"budget": "learned", "calibration_seconds": 0},
}
COMPANY = {
    "few": {"max_running": 3, "state_interval": 8},
    "many": {"max_running": 8, "state_interval": 16},
    "chunks": {"max_running": 5, "chunk_len": 7, "max_step_tokens": 24, "state_interval": 10},
    "crumbs": {"max_running": 8, "chunk_len": 3, "max_step_tokens": 11, "state_interval": 16},
    "scarce": {"max_running": 8, "max_kv_tokens": 130, "state_slots": 9, "state_interval": 4},
}
MIXED = "mixed"  # requests of all parameters, side by side


@dataclass(frozen=True)
class Case:
    """An engine, and what each of its rollouts must be."""

    row: Row
    engine: RolloutEngine
    wanted: dict[tuple[int, int], Rollout]  # by prompt and sample
    params: list[SamplingParams]  # of each prompt
    own_weights: dict[str, torch.Tensor]

    def submit(self, key: tuple[int, int], cut: int = 0) -> Request:
        prompt, sample = key
        partial = self.wanted[key].token_ids[:cut]
        return self.engine.submit(
            prompts()[prompt], self.params[prompt],
            prompt_index=prompt, sample_index=sample, partial_ids=partial,
        )  # fmt: skip

    def run(self, between: Callable[[int], None] = lambda step: None) -> Iterator[Rollout]:
        """Steps until nothing is left. One that raises is run again."""
        steps = 0
        while self.engine.has_unfinished:
            try:
                ended = self.engine.step()
            except HiccupError:
                self.engine.check_integrity()
                continue
            yield from ended
            steps += 1
            between(steps)

    def check(self, rollout: Rollout, cut: int = 0) -> None:
        """``cut``: tokens of it that were there before."""
        wanted = self.wanted[rollout.prompt_index, rollout.sample_index]
        assert numbers(rollout) == numbers(wanted, cut)
        if self.params[rollout.prompt_index].routed_experts:
            assert np.array_equal(rollout.routed_experts, wanted.routed_experts)

    def check_all(self, rollouts: list[Rollout]) -> list[Rollout]:
        assert len(rollouts) == len(self.wanted)
        for rollout in rollouts:
            self.check(rollout)
        return rollouts


class HiccupError(RuntimeError):
    """A step that fails."""


def numbers(rollout: Rollout, cut: int = 0) -> tuple:
    extras = [
        getattr(rollout.extras, name)[cut:]
        for name in ("raw_logprobs", "sampling_logprobs", "top_logprobs", "entropies")
    ]
    return rollout.token_ids[cut:], rollout.logprobs[cut:], extras, rollout.finish_reason


def generated(case: Case) -> list[Rollout]:
    if case.row["params"] != MIXED:
        return case.check_all(case.engine.generate(prompts(), case.params[0]))
    for key in case.wanted:
        case.submit(key)
    return case.check_all(list(case.run()))


def generated_again(case: Case) -> list[Rollout]:
    """With prompts in the prefix cache, and a corpus that knows every answer."""
    generated(case)
    return generated(case)


def disturbed(case: Case) -> list[Rollout]:
    """Between steps, while some requests are in the middle of their prompts or answers."""
    engine = case.engine

    def score_one() -> None:
        with suppress(OutOfMemoryError):  # running requests may need all that there is
            engine.score(prompts()[3], [5, 6, 7])

    acts = [
        lambda: engine.pause_generation("in_place"),
        score_one,
        lambda: engine.pause_generation("retract"),
        lambda: engine.status(),
        lambda: (engine.release_memory(), engine.resume_memory()),
        score_one,
        lambda: engine.flush_cache(),
    ]

    def between(step: int) -> None:
        if step % 3 == 0 and step <= 3 * len(acts):
            acts[step // 3 - 1]()
            engine.continue_generation()
            engine.check_integrity()

    for key in case.wanted:
        case.submit(key)
    rollouts = case.check_all(list(case.run(between)))
    for key, rollout in case.wanted.items():
        scored = engine.score(rollout.prompt_ids, rollout.token_ids, case.params[key[0]])
        assert scored == rollout.logprobs
    return rollouts


def cut_and_resubmitted(case: Case) -> list[Rollout]:
    """They go on as if they had not been cut."""
    cuts = {}
    for number, (key, rollout) in enumerate(case.wanted.items()):
        last = len(rollout.token_ids) - 1
        cuts[key] = (last // 2, min(1, last), last)[number % 3]
        case.submit(key, cuts[key])
    rollouts = list(case.run())
    assert len(rollouts) == len(cuts)
    for rollout in rollouts:
        case.check(rollout, cuts[rollout.prompt_index, rollout.sample_index])
    return rollouts


def failing(case: Case) -> list[Rollout]:
    """Steps that fail behind the forward, behind the commit and at their end can be run again; and
    requests that are aborted have the beginning of what they would have become."""
    worker, random = case.engine.worker, np.random.default_rng(4)
    verify, observe, failed = worker.target.verify, worker.observe, []

    def perhaps() -> None:
        if random.random() < 0.15:
            failed.append(1)
            raise HiccupError

    def verify_perhaps(batch, trees):
        forwarded = verify(batch, trees)
        perhaps()
        return forwarded

    def observe_perhaps(step):
        perhaps()
        observe(step)
        perhaps()

    worker.target.verify, worker.observe = verify_perhaps, observe_perhaps
    requests = [case.submit(key) for key in case.wanted]

    def between(step: int) -> None:
        if step in (2, 6):
            unfinished = [each for each in requests if case.engine.scheduler.has(each.request_id)]
            if unfinished:
                case.engine.abort(unfinished[int(random.integers(len(unfinished)))].request_id)
            case.engine.check_integrity()

    rollouts = list(case.run(between))
    assert len(rollouts) == len(requests)
    assert failed
    whole = [rollout for rollout in rollouts if rollout.finish_reason != "abort"]
    assert 0 < len(whole) < len(rollouts)
    for rollout in whole:
        case.check(rollout)
    for rollout in rollouts:
        wanted, count = (
            case.wanted[rollout.prompt_index, rollout.sample_index],
            len(rollout.token_ids),
        )
        assert rollout.token_ids == wanted.token_ids[:count]
        assert rollout.logprobs == wanted.logprobs[:count]
    return rollouts


def updated(case: Case) -> list[Rollout]:
    """Nothing that other weights gave is met after an update: KV, states, drafts."""
    engine = case.engine
    other = {name: weight * 1.25 for name, weight in case.own_weights.items()}
    keys = list(case.wanted)[-2:]
    for keeps_kv in (False, True):
        engine.update_weights_from_tensor(list(other.items()), selector="target")
        version = engine.weight_versions["target"]
        requests = [case.submit(key) for key in keys]
        while min(len(request.token_ids) for request in requests) < 3 and engine.has_unfinished:
            engine.step()
        engine.update_weights_from_tensor(
            list(case.own_weights.items()), selector="target", flush_cache=not keeps_kv
        )
        for rollout in list(case.run()):
            old = rollout.weight_versions.count(version)
            new = len(rollout.token_ids) - old
            assert rollout.weight_versions == [version] * old + [version + 1] * new
            if new and not keeps_kv:
                check_goes_on(case, rollout, old)
    return generated(case)


def check_goes_on(case: Case, rollout: Rollout, old: int) -> None:
    """The rollout goes on as one that was cut where the weights changed."""
    case.engine.submit(
        rollout.prompt_ids, case.params[rollout.prompt_index],
        request_seed=rollout.seed, partial_ids=rollout.token_ids[:old],
        prompt_index=rollout.prompt_index, sample_index=rollout.sample_index,
    )  # fmt: skip
    [again] = case.run()
    assert numbers(again) == numbers(rollout, old)


EVENTS = {
    "none": generated,
    "again": generated_again,
    "disturbed": disturbed,
    "cut": cut_and_resubmitted,
    "failing": failing,
    "updated": updated,
}
FACTORS: dict[str, tuple[str, ...]] = {
    "worker": (*WORKERS, *ORACLES),
    "event": tuple(EVENTS),
    "model": tuple(MODELS),
    "company": tuple(COMPANY),
    "params": (*PARAMS, MIXED),
    "dtype": ("float32", "bfloat16"),
    "budget": tuple(BUDGETS),
    "prefix cache": ("on", "off"),
    "overlap": ("never", "always"),
}


def is_possible(row: Row) -> bool:
    worker = row.get("worker")
    if worker is None:
        return True
    is_plain = worker == "none" or worker in ORACLES
    if row.get("overlap") == "always" and not (is_plain or worker == "ngram"):
        return False  # these read features of a forward when it has ended
    return row.get("budget") != "learned" or not (is_plain or "lockstep" in worker)


def drafting(worker: str, model: str, company: str) -> Row:
    return {
        "worker": worker, "model": model, "company": company,
        "event": "again", "params": "sampled", "budget": "fixed",
    }  # fmt: skip


WANTED = (  # where drafts are good, where trees meet recurrent layers, where memory is scarce
    drafting("ngram", "tied", "few"),
    drafting("eagle", "shallow", "scarce"),
    drafting("mtp", "llama", "chunks"),
    drafting("eagle3", "recurrent", "few"),
    drafting("mtp", "recurrent", "few"),
    drafting("hybrid", "recurrent", "few"),
    drafting("hybrid mtp", "shallow", "many"),
    drafting("oracle tree", "recurrent", "scarce") | {"prefix cache": "on"},
    drafting("oracle tree", "llama", "scarce"),
)
DESIGN = PairwiseDesign(FACTORS, is_possible)
ROWS = DESIGN.rows(WANTED)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> ParityModels:
    return ParityModels(tmp_path_factory.mktemp("parity"))


def reference(models: ParityModels, row: Row) -> tuple[dict[tuple[int, int], Rollout], list]:
    """Plain decoding's rollouts of all prompts, and the parameters of each prompt."""
    names = list(PARAMS) if row["params"] == MIXED else [row["params"]]
    wanted, params = {}, []
    for prompt in range(len(prompts())):
        name = names[prompt % len(names)]
        routes = row["model"] in SPARSE and row["overlap"] == "never"
        params.append(replace(PARAMS[name], routed_experts=routes))
        for rollout in models.reference(row["model"], row["dtype"], name):
            if rollout.prompt_index == prompt:
                wanted[prompt, rollout.sample_index] = rollout
    return wanted, params


def make_case(models: ParityModels, row: Row) -> Case:
    wanted, params = reference(models, row)
    path = models.target(row["model"])
    options = COMPANY[row["company"]] | {
        "dtype": row["dtype"],
        "prefix_cache": row["prefix cache"] == "on",
        "num_threads": 1,
        "overlap": row["overlap"],
        "record_routes": params[0].routed_experts,
    }
    if row["worker"] in ORACLES:
        recorded = {key: r.prompt_ids + r.token_ids for key, r in wanted.items()}
        factory = oracle_factory(recorded, size=20, **ORACLES[row["worker"]])
        engine = RolloutEngine.from_config(engine_config(str(path), options), factory)
    else:
        spec, kind, spec_options = WORKERS[row["worker"]]
        if spec != "none":
            spec_options = BUDGETS[row["budget"]] | spec_options
        draft = models.draft(row["model"], kind) if kind else None
        if draft is not None:
            spec_options = spec_options | {"draft_path": str(draft)}
        engine = RolloutEngine.from_pretrained(path, spec, spec_options=spec_options, **options)
    names = engine.worker.target.model.destinations()
    stored = load_file(path / "model.safetensors") if row["event"] == "updated" else {}
    own = {name: weight for name, weight in stored.items() if name in names}
    return Case(row, engine, wanted, params, own)


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(row[name] for name in FACTORS).replace(" ", "_")
)
def test_nothing_can_be_seen(models, row):
    case = make_case(models, row)
    watch = StepWatch(case.engine)
    rollouts = EVENTS[row["event"]](case)
    case.engine.check_integrity()
    worker = case.engine.worker
    assert worker.memory.usage.used == 0
    assert worker.counters().get("states/used", 0) == 0
    check_company(case, watch)
    check_drafts(case, watch, rollouts)


def check_company(case: Case, watch: StepWatch) -> None:
    """The row did what it is for."""
    row, worker = case.row, case.engine.worker
    is_recurrent = row["model"] in RECURRENT
    assert (watch.chunks > 0) == (row["company"] in ("chunks", "crumbs"))
    if row["event"] != "cut":  # of which little is left to run
        assert (watch.overlapped > 0) == (row["overlap"] == "always")
    if row["prefix cache"] == "off":
        assert worker.memory.counters.hit == 0
    elif row["event"] in ("again", "disturbed", "updated"):
        assert worker.memory.counters.hit > 0
    if row["company"] == "scarce" and row["event"] == "again" and row["params"] == "sampled":
        if not is_recurrent:  # else it is states that there are too few of
            assert case.engine.metrics().preemptions > 0
        elif row["prefix cache"] == "on":
            assert worker.counters()["states/evicted"] > 0


def check_drafts(case: Case, watch: StepWatch, rollouts: list[Rollout]) -> None:
    """They were of the kind the row is for; a learned budget may find that nothing pays."""
    row, worker = case.row, case.row["worker"]
    if worker == "none" or row["budget"] == "learned":
        return
    assert watch.drafted > 0
    if worker not in ("ngram", "eagle", "mtp lockstep", "oracle chain"):
        assert watch.branched > 0
    if worker in ORACLES:
        wrong = ORACLES[worker]["right"] == 0.0
        assert watch.accepted < 0.1 * watch.drafted if wrong else watch.accepted > 0
    if worker == "oracle tree" and row["company"] != "scarce":
        assert watch.later_children > 0
    if row["event"] != "again" or row["params"] != "sampled":
        return
    assert watch.accepted > 0
    if worker in ("ngram", "hybrid", "hybrid mtp"):  # the corpus knows every answer
        assert sum(r.stats.accepted for r in rollouts) > len(rollouts)
    if worker in ("hybrid", "hybrid mtp"):
        assert case.engine.worker.counters()["draft/trees"] > 0
    if worker in ("eagle3", "mtp", "hybrid"):
        assert watch.later_children > 0
    likely = {("eagle", "shallow"): 0.5, ("mtp", "llama"): 0.1}.get((worker, row["model"]), 0.0)
    assert watch.accepted > likely * sum(r.stats.verify_steps for r in rollouts)


@pytest.mark.parametrize(("model", "dtype"), [("llama", "bfloat16"), ("recurrent", "float32")])
def test_threads_cannot_be_seen(models, model, dtype):
    wanted = models.reference(model, dtype, "shaped")
    threads = torch.get_num_threads()
    try:
        engine = RolloutEngine.from_pretrained(
            models.target(model), "none", dtype=dtype, max_running=8, num_threads=2
        )
        rollouts = engine.generate(prompts(), PARAMS["shaped"])
    finally:
        torch.set_num_threads(threads)
    assert [numbers(rollout) for rollout in rollouts] == [numbers(each) for each in wanted]


def test_any_two_values_meet():
    met = {pair for row in ROWS for pair in DESIGN.pairs_of(row)}
    assert met == set(DESIGN.pairs())
    assert all(map(is_possible, ROWS))
    assert len(ROWS) < 90
