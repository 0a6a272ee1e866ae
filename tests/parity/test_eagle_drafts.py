"""A draft reads only its request's own rows: each is computed again from whole sequences."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutEngine, SamplingParams
from rollout.errors import IntegrityError
from tests.helpers.chain_watch import ChainWatch
from tests.helpers.compared import numbers
from tests.helpers.draft_checks import (
    PROMPTS,
    VOCAB,
    check_disturbed,
    plain_numbers,
)
from tests.helpers.tiny_draft import save_copying_eagle1, save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama

PARAMS = SamplingParams(temperature=0.8, max_new_tokens=8, n=2, seed=3)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return save_tiny_llama(folder, vocab_size=VOCAB, num_layers=1, sharpness=3.0)


@pytest.fixture(scope="module", params=["copying", "eagle3"])
def draft(request, tmp_path_factory, target_path):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "copying":
        return save_copying_eagle1(folder, target_path)
    return save_tiny_eagle3(folder, target_path, layers=(0, 1), draft_vocab_size=40, unsorted=True)


def make_engine(target_path, draft, *, spec_options=None, **options):
    """With a watch on its drafter."""
    own = {"draft_path": str(draft), "budget": "fixed", "topk": 2, "num_steps": 3}
    engine = RolloutEngine.from_pretrained(
        str(target_path),
        "eagle",
        spec_options=own | (spec_options or {}),
        **{"num_threads": 1, "max_running": 5, "chunk_len": 9, "dtype": "float32"} | options,
    )
    return engine, ChainWatch(engine.worker.drafter)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False},
        {"max_step_tokens": 11},
    ],
    ids=str,
)
def test_every_row_is_what_whole_sequences_give(target_path, draft, options):
    engine, watch = make_engine(target_path, draft, **options)
    for params in (GREEDY, PARAMS):  # the second time prompts are in the prefix cache
        rollouts = engine.generate(PROMPTS, params)
        assert numbers(rollouts) == plain_numbers(target_path, PROMPTS, params)
        engine.check_integrity()
    assert watch.known[0] > 100
    assert watch.nodes[0] > 100
    (holes,) = watch.holes
    if options.get("prefix_cache") is False:
        assert not any(holes)
    else:
        # Siblings part behind the prompt: its last position is one's own, and the others' hole.
        assert 0 < sum(holes) / len(holes) < 2


def test_rows_whose_hidden_states_nobody_reads_change_no_bit(target_path, draft):
    """Of known positions only keys, values and the last one's hidden state are computed."""

    def drafted(last_alone: bool):
        engine, watch = make_engine(target_path, draft)
        drafter, (own, run_nodes) = engine.worker.drafter, watch._own[0]
        runner, propose, trees, given = drafter.runners[0], watch._propose, [], []

        def extend(runs, hidden_TE, *, last_alone):
            given.append(len(out_TE := own(runs, hidden_TE, last_alone=last_alone)))
            return out_TE

        def whole(runs, hidden_TE, *, last_alone):
            out_TE = extend(runs, hidden_TE, last_alone=False)
            return out_TE[np.cumsum(runs.lens_B)[runs.lens_B > 0] - 1]

        runner.extend, runner.run_nodes = extend if last_alone else whole, run_nodes
        drafter.propose = lambda *args, **options: (
            trees.append(propose(*args, **options)),
            trees[-1],
        )[1]
        rollouts = engine.generate(PROMPTS, PARAMS)
        found = [(tree.tokens_N.tolist(), tree.probs_N.tolist()) for tree in trees]
        return numbers(rollouts), found, sum(given)

    ours, whole = drafted(True), drafted(False)
    assert ours[:2] == whole[:2]
    assert sum(len(tokens) for tokens, _ in ours[1]) > 100
    assert ours[2] < whole[2] - 20, "rows of prompts"


def test_an_engines_integrity_is_its_drafts_too(target_path, draft):
    engine, _ = make_engine(target_path, draft)
    request = engine.submit(PROMPTS[3], SamplingParams(max_new_tokens=24, ignore_eos=True))
    while len(request.token_ids) < 6:
        engine.step()
    engine.check_integrity()
    own = engine.worker.drafter.runners[0].kv.table[request.row]
    own[[1, 2]] = own[[2, 1]]
    with pytest.raises(IntegrityError, match="draft"):
        engine.check_integrity()
    own[[1, 2]] = own[[2, 1]]


def test_prompts_are_read_while_nothing_is_drafted(target_path, draft):
    """They are not run again once they are cached; what is decoded meanwhile leaves holes."""
    engine, watch = make_engine(target_path, draft)
    budget, prompt = engine.worker.budget, PROMPTS[3]
    floors = budget.floors
    budget.is_open, budget.floors = False, lambda batch: None
    params = SamplingParams(temperature=0.8, max_new_tokens=24, ignore_eos=True)
    request = engine.submit(prompt, params)
    while len(request.token_ids) < 6:
        engine.step()
    assert watch.known[0] == len(prompt)
    decoded = len(request.token_ids)
    budget.is_open, budget.floors = True, floors
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
        engine.check_integrity()
    assert numbers(ended) == plain_numbers(target_path, [prompt], params)
    assert watch.nodes[0] > 0
    assert max(watch.holes[0]) == decoded - 1  # the last one had not been run yet


def test_whatever_happens_between_and_within_steps(target_path, draft, monkeypatch):
    """Scarce slots, retractions, aborts, scoring, sleep, dropped prefixes, steps that fail."""
    random = np.random.default_rng(2)
    params = SamplingParams(temperature=0.9, max_new_tokens=24, n=2, seed=2)
    wanted = plain_numbers(target_path, PROMPTS, params)
    engine, watch = make_engine(target_path, draft, max_kv_tokens=64)

    def sometimes(*args):
        if random.random() < 0.1:
            raise RuntimeError("a hiccup")

    verify = engine.worker.target.verify
    monkeypatch.setattr(
        engine.worker.target, "verify", lambda *args: (verify(*args), sometimes())[0]
    )
    monkeypatch.setattr(engine.worker.budget, "observe", sometimes)  # when all else is done
    check_disturbed(engine, PROMPTS, params, wanted, random)
    assert watch.nodes[0] > 100


def test_new_weights_of_the_target_are_met_by_no_old_draft(target_path, draft, tmp_path):
    """The watch computes with the weights there are."""
    engine, watch = make_engine(target_path, draft)
    other = save_tiny_llama(tmp_path, vocab_size=VOCAB, num_layers=1, sharpness=3.0, seed=9)
    engine.generate(PROMPTS, PARAMS)
    engine.submit(PROMPTS[3], PARAMS)
    for _ in range(6):
        engine.step()
    before = watch.nodes[0]
    engine.update_weights_from_disk(str(other), selector="target")
    while engine.has_unfinished:
        engine.step()
    assert numbers(engine.generate(PROMPTS, PARAMS)) == plain_numbers(other, PROMPTS, PARAMS)
    assert watch.nodes[0] > before
    engine.check_integrity()


def test_new_weights_of_the_draft_are_met_by_nothing_it_computed(target_path, draft):
    """The target's KV and its prefix cache stay."""
    engine, watch = make_engine(target_path, draft)
    expected = plain_numbers(target_path, PROMPTS, PARAMS)
    assert numbers(engine.generate(PROMPTS, PARAMS)) == expected
    engine.submit(PROMPTS[3], PARAMS)
    for _ in range(6):
        engine.step()
    names = engine.worker.drafter.runners[0].model.weight_loaders()
    engine.update_weights_from_tensor(
        [(name, place.read() * 1.3) for name, place in names.items()], selector="draft"
    )
    while engine.has_unfinished:
        engine.step()
    watch.holes[0].clear()
    assert numbers(engine.generate(PROMPTS, PARAMS)) == expected
    assert max(watch.holes[0]) > 8  # cached for the target, not read again by the draft
    engine.check_integrity()


def test_an_update_that_keeps_kv_leaves_the_draft_none(target_path, draft, tmp_path):
    engine = RolloutEngine.from_pretrained(
        str(target_path),
        "eagle",
        spec_options={"draft_path": str(draft), "budget": "fixed"},
        num_threads=1,
    )
    kv = engine.worker.drafter.runners[0].kv
    other = save_tiny_llama(tmp_path, vocab_size=VOCAB, num_layers=1, sharpness=3.0, seed=9)
    params = SamplingParams(temperature=0.8, max_new_tokens=40, ignore_eos=True)
    request = engine.submit(PROMPTS[3], params)
    for _ in range(4):
        engine.step()
    assert kv.lens_Q[request.row] == len(request.tokens) - 1
    before = len(request.tokens)
    engine.update_weights_from_disk(str(other), selector="target", flush_cache=False)
    assert not kv.lens_Q.any()
    proposed = request.stats.proposed
    engine.step()
    assert request.stats.proposed == proposed
    assert kv.lens_Q[request.row] == 1
    engine.step()
    assert request.stats.proposed > proposed
    assert kv.lens_Q[request.row] == len(request.tokens) - before
