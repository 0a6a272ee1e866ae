"""The parity matrix: whatever runs beside, before or between, tokens and logprobs are bit for bit
those of plain decoding, one request at a time.

A batch of m is a batch of n; chunked prefill is prefill; decode is prefill; verify is decode;
speculation on is off; `score` gives what generation gave; and neither preemption, prefix cache,
recurrent state, windows' slots, threads nor what happens between two steps can be seen.
Each row is an engine of one value of each factor; any two values that can meet do so in some row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rollout import Rollout, RolloutEngine
from rollout.config import engine_config
from spec_workers.step.observation import Observation
from tests.helpers.compared import numbers
from tests.helpers.oracle_worker import oracle_factory
from tests.helpers.pairwise import PairwiseDesign, Row
from tests.helpers.parity_events import EVENTS, Case
from tests.helpers.parity_models import MODELS, PARAMS, RECURRENT, SPARSE, ParityModels, prompts

WORKERS: dict[str, tuple[str, str | None, dict]] = {  # spec, kind of draft, options
    "none": ("none", None, {}),
    "ngram": ("ngram", None, {"num_draft_tokens": 12}),
    "eagle": ("eagle", "eagle", {"topk": 1}),
    "eagle3": ("eagle", "eagle3", {"num_draft_tokens": 63}),
    "eagle lockstep": ("eagle", "eagle3", {"lockstep": True, "num_steps": 2, "topk": 8}),
    "block": ("block", "dflash", {"num_draft_tokens": 24}),
    "block lockstep": ("block", "dflash", {"lockstep": True, "num_steps": 3}),
    "hybrid block": ("hybrid", "dflash", {}),
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
    "scarce": {"max_running": 8, "max_kv_tokens": 130, "state_slots": 9, "state_interval": 4,
               "window_slots": 88},  # of four requests
}  # fmt: skip
MIXED = "mixed"  # requests of all parameters, side by side
FACTORS: dict[str, tuple[str, ...]] = {
    "worker": (*WORKERS, *ORACLES),
    "event": tuple(EVENTS),
    "model": tuple(MODELS),
    "company": tuple(COMPANY),
    "params": (*PARAMS, MIXED),
    "dtype": ("float32", "bfloat16"),
    "budget": tuple(BUDGETS),
    "prefix cache": ("on", "off"),
}


class StepWatch:
    """Counts chunks and branching draft trees, from before the first step."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.chunks = 0  # runs that ended within a prompt
        self.branched = 0  # trees in which a node had siblings
        self.later_children = 0  # accepted nodes before which a sibling was verified
        self.drafted = self.accepted = 0
        self._observe = engine.worker.observe
        engine.worker.observe = self.observe

    def observe(self, step: Observation) -> None:
        offsets = step.trees.offsets_B1.tolist()
        for b, (entry, result) in enumerate(zip(step.batch.entries, step.results, strict=True)):
            parents = step.trees.parents_N[offsets[b] : offsets[b + 1]].tolist()
            self.chunks += not entry.samples
            self.branched += len(set(parents)) < len(parents)
            self.drafted += len(parents)
            self.accepted += len(result.path)
            later = [node for node in result.path if parents[node - 1] in parents[: node - 1]]
            self.later_children += len(later)
        self._observe(step)


def is_possible(row: Row) -> bool:
    worker = row.get("worker")
    if worker is None:
        return True
    is_plain = worker == "none" or worker in ORACLES
    return row.get("budget") != "learned" or not (is_plain or "lockstep" in worker)


def drafting(worker: str, model: str, company: str) -> Row:
    return {
        "worker": worker, "model": model, "company": company,
        "event": "again", "params": "sampled", "budget": "fixed",
    }  # fmt: skip


WANTED = (  # where drafts are good, where trees meet recurrent layers, where memory is scarce
    drafting("ngram", "windows", "few"),
    drafting("eagle", "shallow", "scarce"),
    drafting("block", "llama", "chunks"),
    drafting("hybrid block", "recurrent", "scarce"),
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


def reference(models: ParityModels, row: Row) -> tuple[dict[tuple[int, int], Rollout], list]:
    """Plain decoding's rollouts of all prompts, and the parameters of each prompt."""
    names = list(PARAMS) if row["params"] == MIXED else [row["params"]]
    wanted, params = {}, []
    for prompt in range(len(prompts())):
        name = names[prompt % len(names)]
        routes = row["model"] in SPARSE
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
    names = engine.worker.target.model.weight_loaders()
    stored = load_file(path / "model.safetensors") if row["event"] == "updated" else {}
    own = {name: weight for name, weight in stored.items() if name in names}
    return Case(engine, wanted, params, own)


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
    assert worker.counters().get("windows/used", 0) == 0
    assert (worker.memory.windows is not None) == (row["model"] == "windows")
    check_company(row, case.engine, watch)
    check_drafts(row, case.engine, watch, rollouts)


def check_company(row: Row, engine: RolloutEngine, watch: StepWatch) -> None:
    """The row did what it is for."""
    worker = engine.worker
    is_recurrent = row["model"] in RECURRENT
    if (row["company"], row["model"]) != ("scarce", "windows"):  # window slots cut runs as well
        assert (watch.chunks > 0) == (row["company"] in ("chunks", "crumbs"))
    if row["prefix cache"] == "off":
        assert worker.memory.counters.hit == 0
    elif row["event"] in ("again", "disturbed", "updated"):
        assert worker.memory.counters.hit > 0
    if row["company"] == "scarce" and row["event"] == "again" and row["params"] == "sampled":
        if not is_recurrent:  # else it is states that there are too few of
            assert engine.metrics().preemptions > 0
        elif row["prefix cache"] == "on":
            assert worker.counters()["states/evicted"] > 0


def check_drafts(
    row: Row, engine: RolloutEngine, watch: StepWatch, rollouts: list[Rollout]
) -> None:
    """They were of the kind the row is for; a learned budget may find that nothing pays."""
    worker = row["worker"]
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
        assert engine.worker.counters()["draft/trees"] > 0
    if worker in ("eagle3", "block", "mtp", "hybrid"):
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
    assert numbers(rollouts) == numbers(wanted)


def test_any_two_values_meet():
    met = {pair for row in ROWS for pair in DESIGN.pairs_of(row)}
    assert met == set(DESIGN.pairs())
    assert all(map(is_possible, ROWS))
