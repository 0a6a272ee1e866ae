"""The proposer inside vLLM, on arrays as vLLM hands them over."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from rollout.errors import InvalidInputError
from spec_workers.vllm import CorpusWorkerExtension, NgramProposer
from spec_workers.vllm.chain_budget import ChainStep, JudgedTokens, LearnedChains
from spec_workers.vllm.chains import NOTHING_JUDGED
from tests.helpers.vllm_rows import VOCABULARY, RowRequest, VllmRows, vllm_config

FIXED = {"budget": "fixed", "min_probability": 0.0, "corpus_bytes": 1 << 20}


@pytest.fixture
def rows() -> VllmRows:
    return VllmRows(NgramProposer(vllm_config(**FIXED)))


def requests(count: int) -> list[RowRequest]:
    """Requests of two prompts, whose outputs are those of few originals."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCABULARY, (2, 9)).tolist()
    outputs = rng.integers(0, VOCABULARY, (2, 40)).tolist()
    return [RowRequest(prompts[k % 2], outputs[k % 2][: 25 + k]) for k in range(count)]


def test_the_second_epoch_takes_fewer_steps_and_each_token_enters_once(rows) -> None:
    alone = max(len(each.output) for each in requests(5))
    rows.run(requests(5))
    generated = sum(len(each.output) for each in requests(5))
    first = rows.proposer.counters()
    assert first["corpus/inserted_tokens"] == generated + 2 * 9  # prompts are shared
    assert rows.run(requests(5)) < alone / 2
    counters = rows.proposer.counters()
    assert counters["corpus/inserted_tokens"] == 2 * generated + 2 * 9
    accepted = counters["accepted"] - first["accepted"]
    assert accepted > counters["rows"] - first["rows"]  # an accept length above 2
    assert counters["propose_seconds"] > 0
    rows.run([RowRequest([-1, VOCABULARY + 5, 3], [4, 5, -1, 6])])  # outside of the vocabulary
    rows.proposer.check_integrity()


def test_drafts_follow_requests_that_move_leave_and_come_back(rows) -> None:
    rows.run(requests(4))
    rows.requests = requests(4)
    rows.step(in_prefill={rows.requests[2]})
    away = rows.requests[0]
    rows.leave(away)
    for _ in range(3):
        rows.step()
    rows.requests.append(away)
    rows.step(in_prefill={away})
    assert not rows.drafts[away]
    rows.step()
    assert rows.drafts[away]
    for request, draft in rows.drafts.items():
        rest = request.output[request.done :]
        assert draft[: len(rest)] == rest[: len(draft)]
    assert rows.proposer.counters()["corpus/open_sequences"] == 8
    rows.run(rows.requests)
    rows.proposer.check_integrity()


@pytest.mark.parametrize("num_tokens", [1, 63])
def test_chains_are_never_longer_than_asked_for_nor_than_the_context(num_tokens: int) -> None:
    proposer = NgramProposer(vllm_config(num_tokens, max_rows=3, max_len=50, **FIXED))
    rows = VllmRows(proposer, max_rows=3, max_len=50)
    for _ in range(2):
        rows.requests = [RowRequest([5, 6, 7], list(range(100, 146)))]
        request = rows.requests[0]
        longest = 0
        while len(request.tokens) < 49:
            rows.step()
            draft = rows.drafts[request]
            longest = max(longest, len(draft))
            assert len(draft) <= min(num_tokens, 50 - 1 - len(request.tokens))
    assert longest == num_tokens or (num_tokens == 63 and longest > 8)
    assert proposer.propose([], rows.lengths_R, rows.token_ids_RL) == []


def test_an_older_policy_counts_for_less(rows) -> None:
    rows.run([RowRequest([1, 2, 3], [10, 11, 12, 13]) for _ in range(3)])
    rows.proposer.set_weight_version(1)
    rows.run([RowRequest([1, 2, 3], [10, 21, 22, 23]) for _ in range(3)])
    rows.requests = [RowRequest([1, 2, 3], [10, 21])]
    rows.step()
    assert rows.drafts[rows.requests[0]][0] == 21
    with pytest.raises(InvalidInputError, match=r"version=-1"):
        rows.proposer.set_weight_version(-1)


def test_a_saved_corpus_begins_another_engine(rows, tmp_path: Path) -> None:
    first = rows.run(requests(3))
    rows.proposer.save_corpus(tmp_path / "corpus")
    options = {**FIXED, "corpus_path": str(tmp_path / "corpus")}
    fresh = VllmRows(NgramProposer(vllm_config(**options)))
    again = VllmRows(NgramProposer(vllm_config(**FIXED)))
    again.proposer.load_corpus(tmp_path / "corpus")
    assert fresh.run(requests(3)) == again.run(requests(3)) < first


def test_external_corpora_by_the_workers_calls(rows) -> None:
    worker = CorpusWorkerExtension()
    worker.model_runner = object()  # without the proposer
    worker.set_corpus_policy(1)
    assert worker.corpus_counters() == {}
    worker.model_runner = type("Runner", (), {"drafter": rows.proposer})()
    worker.add_external_corpus("code", token_chunks=[list(range(200, 240))])
    rows.proposer._corpus.wait("code", None)
    assert worker.corpus_counters()["external/code"] == 1.0
    rows.requests = [RowRequest([1, 200, 201], [202, 203, 204])]
    rows.step()
    assert rows.drafts[rows.requests[0]][:2] == [203, 204]
    with pytest.raises(InvalidInputError, match=r"name='code': is taken"):
        worker.add_external_corpus("code", token_chunks=[[1]])
    worker.remove_external_corpus("code")
    worker.set_corpus_policy(3)
    counters = worker.corpus_counters()
    assert counters["corpus/weight_version"] == 3
    assert "external/code" not in counters
    rows.proposer.close()


def test_options_that_cannot_be_are_refused_by_name() -> None:
    for options, message in (
        ({"budget": "learnt"}, r"budget='learnt': .* did you mean learned"),
        ({"min_probability": 2}, r"min_probability=2: must be a number from 0 to 1"),
        ({"corpus_bytes": 1}, r"corpus_bytes=1: "),
        ({"corpus_path": "/nowhere"}, r"corpus_path='/nowhere': there is no such"),
        ({"external_corpora": {"a": "/nowhere"}}, r"external_corpora\.a="),
        ({"corpus": 1}, r"corpus=1: must be one of .* did you mean corpus_"),
    ):
        with pytest.raises(InvalidInputError, match=rf"additional_config.specrollout\.{message}"):
            NgramProposer(vllm_config(**options))
    for num_tokens in (0, 64, None):
        with pytest.raises(InvalidInputError, match=r"config\.num_speculative_tokens="):
            NgramProposer(vllm_config(num_tokens))
    with pytest.raises(InvalidInputError, match=r"corpus_bytes=1048576: has room for 32 requests"):
        NgramProposer(vllm_config(max_rows=33, corpus_bytes=1 << 20))


def drafted_per_row(token_ms: float, accepted: bool) -> float:
    """Tokens that a budget has verified of chains of four, per row of its last steps, on a machine
    where a forward of eight rows takes 10 ms and each further row ``token_ms``."""
    budget = LearnedChains(4, 8, 256, [], 0.0)
    offsets_B1, depths_N = np.arange(9) * 4, np.tile(np.arange(1, 5), 8)
    probs_N = np.tile(np.array([0.9, 0.8, 0.7, 0.6]), 8)
    drafted = []
    for _ in range(400):
        counts_B, judged = np.zeros(8, np.int64), NOTHING_JUDGED
        if budget.floor(8, 100) is not None:
            counts_B = budget.choose(probs_N, depths_N, offsets_B1)
            kept_N = depths_N <= np.repeat(counts_B, 4)
            judged = JudgedTokens(
                probs_N=probs_N[kept_N], depths_N=depths_N[kept_N],
                accepted_N=np.full(kept_N.sum(), accepted),
            )  # fmt: skip
        drafted.append(int(counts_B.sum()))
        step = chain_step(8, drafted[-1], 10.0 + token_ms * drafted[-1], judged, accepted=accepted)
        budget.observe(step)
    return float(np.mean(drafted[-100:])) / 8


def chain_step(width, num_drafted, milliseconds, judged, *, accepted=False) -> ChainStep:
    return ChainStep(
        width=width, num_drafted=num_drafted, longest=100, judged=judged,
        num_accepted=num_drafted if accepted else 0, milliseconds=milliseconds, drafting_ms=0.05,
    )  # fmt: skip


def test_chains_have_the_length_that_pays() -> None:
    assert drafted_per_row(0.02, accepted=True) > 3.5  # nearly free
    assert drafted_per_row(2.0, accepted=True) < 0.3  # more expensive than a row's own token
    assert drafted_per_row(0.3, accepted=False) < 0.3  # never right
    budget = LearnedChains(4, 8, 256, [1, 2, 4, 8], 0.02)
    budget.observe(chain_step(2, 0, math.nan, NOTHING_JUDGED))
    assert not budget.curve.is_known
    assert budget.counters()["gate_open"] == 1.0


def test_the_plugin_registers_a_short_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "specrollout", raising=False)
    (entry,) = entry_points(group="vllm.general_plugins", name="specrollout")
    for _ in range(2):  # vLLM may load plugins twice
        entry.load()()
    short = import_module("specrollout")
    assert short.NgramProposer is NgramProposer
    assert not hasattr(short, "__file__")  # nor is anything imported for that
    with pytest.raises(AttributeError):
        _ = short.Another
