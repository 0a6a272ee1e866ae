"""The proposer inside vLLM, on arrays as vLLM hands them over."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.errors import InvalidInputError
from spec_workers.vllm import CorpusWorkerExtension, NgramProposer
from spec_workers.vllm.chain_budget import ChainStep, JudgedTokens, LearnedChains
from spec_workers.vllm.chains import NOTHING_JUDGED
from tests.helpers.vllm_rows import VOCABULARY, RowRequest, VllmRows, vllm_config

FIXED = {"budget": "fixed", "min_probability": 0.0, "corpus_bytes": 1 << 20}


def requests(count: int, seed: int = 0) -> list[RowRequest]:
    """Requests of two prompts, whose outputs are those of few originals."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCABULARY, (2, 9)).tolist()
    outputs = rng.integers(0, VOCABULARY, (2, 40)).tolist()
    return [RowRequest(prompts[k % 2], outputs[k % 2][: 25 + k]) for k in range(count)]


def test_the_second_epoch_takes_fewer_steps_and_each_token_enters_once() -> None:
    proposer = NgramProposer(vllm_config(**FIXED))
    rows = VllmRows(proposer)
    alone = max(len(each.output) for each in requests(5))
    rows.run(requests(5))
    generated = sum(len(each.output) for each in requests(5))
    first = proposer.counters()
    assert first["corpus/inserted_tokens"] == generated + 2 * 9  # prompts are shared
    assert rows.run(requests(5)) < alone / 2
    counters = proposer.counters()
    assert counters["corpus/inserted_tokens"] == 2 * generated + 2 * 9
    accepted = counters["accepted"] - first["accepted"]
    assert accepted > counters["rows"] - first["rows"]  # an accept length above 2
    assert counters["propose_seconds"] > 0
    proposer.check_integrity()


def test_drafts_follow_requests_that_move_leave_and_come_back() -> None:
    proposer = NgramProposer(vllm_config(**FIXED))
    rows = VllmRows(proposer)
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
    assert proposer.counters()["corpus/open_sequences"] == 8
    rows.run(rows.requests)
    proposer.check_integrity()


@pytest.mark.parametrize("num_tokens", [1, 3, 63])
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


def test_tokens_outside_of_the_vocabulary_do_no_harm() -> None:
    proposer = NgramProposer(vllm_config(**FIXED))
    VllmRows(proposer).run([RowRequest([-1, VOCABULARY + 5, 3], [4, 5, -1, 6])])
    proposer.check_integrity()


def test_an_older_policy_counts_for_less() -> None:
    proposer = NgramProposer(vllm_config(**FIXED))
    rows = VllmRows(proposer)
    rows.run([RowRequest([1, 2, 3], [10, 11, 12, 13]) for _ in range(3)])
    proposer.set_weight_version(1)
    rows.run([RowRequest([1, 2, 3], [10, 21, 22, 23]) for _ in range(3)])
    assert proposer.counters()["corpus/weight_version"] == 1
    rows.requests = [RowRequest([1, 2, 3], [10, 21])]
    rows.step()
    assert rows.drafts[rows.requests[0]][0] == 21
    with pytest.raises(InvalidInputError, match=r"version=-1"):
        proposer.set_weight_version(-1)


def test_a_saved_corpus_begins_another_engine(tmp_path: Path) -> None:
    proposer = NgramProposer(vllm_config(**FIXED))
    VllmRows(proposer).run(requests(3))
    proposer.save_corpus(tmp_path / "corpus")
    options = {**FIXED, "corpus_path": str(tmp_path / "corpus")}
    fresh = VllmRows(NgramProposer(vllm_config(**options)))
    again = VllmRows(NgramProposer(vllm_config(**FIXED)))
    again.proposer.load_corpus(tmp_path / "corpus")
    empty = VllmRows(NgramProposer(vllm_config(**FIXED)))
    assert fresh.run(requests(3)) == again.run(requests(3)) < empty.run(requests(3))


def test_external_corpora_by_the_workers_calls() -> None:
    proposer = NgramProposer(vllm_config(**FIXED))
    worker = CorpusWorkerExtension()
    worker.model_runner = type("Runner", (), {"drafter": proposer})()
    worker.add_external_corpus("code", token_chunks=[list(range(200, 240))])
    proposer._corpus.wait("code", None)
    assert worker.corpus_counters()["external/code"] == 1.0
    rows = VllmRows(proposer)
    rows.requests = [RowRequest([1, 200, 201], [202, 203, 204])]
    rows.step()
    assert rows.drafts[rows.requests[0]][:2] == [203, 204]
    with pytest.raises(InvalidInputError, match=r"name='code': is taken"):
        worker.add_external_corpus("code", token_chunks=[[1]])
    worker.remove_external_corpus("code")
    worker.set_corpus_policy(3)
    assert "external/code" not in worker.corpus_counters()
    proposer.close()


def test_a_worker_without_the_proposer_ignores_the_calls() -> None:
    worker = CorpusWorkerExtension()
    worker.model_runner = object()
    worker.set_corpus_policy(1)
    assert worker.corpus_counters() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "learnt"}, r"specrollout\.budget='learnt': .* did you mean learned"),
        ({"min_probability": 2}, r"specrollout\.min_probability=2: must be a number from 0 to 1"),
        ({"corpus_bytes": 1.5}, r"specrollout\.corpus_bytes=1\.5: must be an integer"),
        ({"corpus_bytes": 1}, r"specrollout\.corpus_bytes=1: "),
        ({"corpus_path": "/nowhere"}, r"specrollout\.corpus_path='/nowhere': there is no such"),
        ({"external_corpora": {"a": "/nowhere"}}, r"specrollout\.external_corpora\.a="),
        ({"corpus": 1}, r"specrollout\.corpus=1: must be one of .* did you mean corpus_"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=f"additional_config.{message}"):
        NgramProposer(vllm_config(**options))


@pytest.mark.parametrize("num_tokens", [0, 64, None])
def test_a_number_of_tokens_that_cannot_be_is_refused(num_tokens: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"speculative_config\.num_speculative_tokens="):
        NgramProposer(vllm_config(num_tokens))


def test_a_corpus_too_small_for_vllms_rows_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"corpus_bytes=1048576: has room for 32 requests"):
        NgramProposer(vllm_config(max_rows=33, corpus_bytes=1 << 20))


def drafted_per_row(token_ms: float, accepted: bool, steps: int = 400) -> float:
    """Tokens that a budget has verified of chains of four, per row of its last steps, on a machine
    where a forward of eight rows takes 10 ms and each further row ``token_ms``."""
    budget = LearnedChains(4, 8, 256, [], 0.0)
    offsets_B1, depths_N = np.arange(9) * 4, np.tile(np.arange(1, 5), 8)
    probs_N = np.tile(np.array([0.9, 0.8, 0.7, 0.6]), 8)
    drafted = []
    for _ in range(steps):
        counts_B, judged = np.zeros(8, np.int64), NOTHING_JUDGED
        if budget.floor(8, 100) is not None:
            counts_B = budget.choose(probs_N, depths_N, offsets_B1)
            kept_N = depths_N <= np.repeat(counts_B, 4)
            judged = JudgedTokens(
                probs_N=probs_N[kept_N], depths_N=depths_N[kept_N],
                accepted_N=np.full(kept_N.sum(), accepted),
            )  # fmt: skip
        drafted.append(int(counts_B.sum()))
        budget.observe(
            ChainStep(
                width=8,
                num_drafted=drafted[-1],
                longest=100,
                num_accepted=drafted[-1] if accepted else 0,
                milliseconds=10.0 + token_ms * drafted[-1],
                drafting_ms=0.05,
                judged=judged,
            )
        )
    return float(np.mean(drafted[-100:])) / 8


def test_chains_have_the_length_that_pays() -> None:
    assert drafted_per_row(0.02, accepted=True) > 3.5  # nearly free
    assert drafted_per_row(2.0, accepted=True) < 0.3  # dearer than a row's own token
    assert drafted_per_row(0.3, accepted=False) < 0.3  # never right


def test_a_budget_ignores_steps_of_unknown_time() -> None:
    budget = LearnedChains(4, 8, 256, [1, 2, 4, 8], 0.02)
    step = ChainStep(
        width=2, num_drafted=0, longest=9, num_accepted=0, milliseconds=math.nan, drafting_ms=0.1,
        judged=NOTHING_JUDGED,
    )  # fmt: skip
    budget.observe(step)
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
