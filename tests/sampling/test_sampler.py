"""The sampler against a slow reading of its own definition, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollout.sampling.rows import SampleRows, rows_of_continuation, sample_rows
from rollout.sampling.sampler import Sampler, TreeSampler
from tests.helpers.requests import decode_batch, make_request, make_trees
from tests.helpers.sampled import sample, score

VOCAB = 1500
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 2.0, "top_p": 0.999},  # a nucleus wider than any prefix
    {"temperature": 1.0, "min_p": 0.1, "top_k": 1200},
    {"temperature": 0.9, "repetition_penalty": 1.7},
    {"temperature": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {3: 8.0, 7: -100.0}},
    {"temperature": 1.0, "min_new_tokens": 6, "max_new_tokens": 20, "stop_token_ids": [10**30]},
    {"temperature": 1.0, "top_p": 0.7, "repetition_penalty": 0.8, "min_new_tokens": 3},
]


def random_rows(seed=0):
    rng = np.random.default_rng(seed)
    requests = [
        make_request(
            rng.integers(0, 30, 9).tolist(), prompt_len=5, seed=int(rng.integers(2**60)),
            eos=(3,), request_id=i, raw_logprobs=True, sampling_logprobs=True, top_logprobs=3,
            entropy=True, **params,
        )
        for i, params in enumerate(PARAMS)
    ]  # fmt: skip
    trees = make_trees([(rng.integers(0, 30, 5).tolist(), [0, 0, 1, 3, 2]) for _ in requests])
    rows, _ = sample_rows(decode_batch(requests), trees)
    logits = torch.from_numpy(rng.normal(size=(len(rows.requests), VOCAB)) * 3).float()
    return rows, logits


def slow_logits(rows, row, logits_V):
    """Penalties and bias, written for a reader: float64, token by token."""
    request, params = rows.requests[row], rows.requests[row].params
    logits = logits_V.double().tolist()
    context = request.tokens + rows.drafted[row]
    output = context[request.prompt_len :]
    for token in set(context):
        value = logits[token]
        penalty = params.repetition_penalty
        logits[token] = value / penalty if value > 0 else value * penalty
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return torch.tensor(logits, dtype=torch.float64)


def slow_allowed(rows, row, logits_V):
    request, params = rows.requests[row], rows.requests[row].params
    allowed = torch.ones(VOCAB, dtype=torch.bool)
    if request.generated_len + len(rows.drafted[row]) < params.min_new_tokens:
        allowed[3] = False
    scaled = logits_V / (params.temperature or 1.0)
    scaled = torch.where(allowed, scaled, float("-inf"))
    if params.top_k > 0:
        scaled[scaled < scaled.sort(descending=True).values[params.top_k - 1]] = float("-inf")
    probs, order = scaled.softmax(0).sort(descending=True)
    dropped = order[(probs.cumsum(0) - probs) >= params.top_p]
    if params.top_p < 1:
        scaled[dropped] = float("-inf")
    if params.min_p:
        scaled[scaled < scaled.max() + math.log(params.min_p)] = float("-inf")
    return scaled > float("-inf")


def test_every_number_matches_the_slow_reading():
    rows, logits = random_rows()
    sampled = sample(logits, rows)
    for row, request in enumerate(rows.requests):
        temperature = request.params.temperature or 1.0
        shaped = slow_logits(rows, row, logits[row])
        allowed = slow_allowed(rows, row, shaped)
        token, extras = sampled.tokens[row], sampled.extras[row]
        assert allowed[token], request.params
        logprobs = (shaped / temperature).log_softmax(0)
        assert sampled.logprobs[row] == pytest.approx(float(logprobs[token]), abs=1e-4)
        raw = logits[row].double().log_softmax(0)
        assert extras.raw_logprobs == pytest.approx([float(raw[token])], abs=1e-4)
        kept = torch.where(allowed, shaped / temperature, float("-inf")).log_softmax(0)
        assert extras.sampling_logprobs == pytest.approx([float(kept[token])], abs=1e-4)
        best = logprobs.topk(3)
        assert [t for t, _ in extras.top_logprobs[0]] == best.indices.tolist()
        assert [p for _, p in extras.top_logprobs[0]] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
        entropy = -(logprobs.exp() * logprobs).sum()
        assert extras.entropies == pytest.approx([float(entropy)], abs=1e-3)
        if request.params.temperature == 0:
            assert token == int(shaped.argmax())


@pytest.mark.parametrize("params", [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("prompt_len", [1, 3])
def test_a_path_counts_with_what_was_emitted_before_it(params, prompt_len):
    """Also where nothing was: the path is all the output there is, in any order, with repeats."""
    request = make_request([6, 7, 8], prompt_len=prompt_len, **params)
    rows, _ = sample_rows(decode_batch([request]), make_trees([([9, 4, 9, 4], [0, 1, 2, 3])]))
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(5, VOCAB)) * 3).float()
    logits[:, 4:10] += 8
    sampled = sample(logits, rows)
    for row, token in enumerate(sampled.tokens):
        expected = slow_logits(rows, row, logits[row]).log_softmax(0)[token]
        assert sampled.logprobs[row] == pytest.approx(float(expected), abs=1e-4)


def test_a_row_is_the_same_alone_and_in_company():
    rows, logits = random_rows()
    together = sample(logits, rows)
    order = np.random.default_rng(1).permutation(len(rows.requests))
    for subset in ([3], [0, 8], order.tolist()):
        part = SampleRows(
            owners=[rows.requests[r] for r in subset],
            counts_O=np.ones(len(subset), dtype=np.int64),
            positions_R=rows.positions_R[subset],
            find_paths=lambda subset=subset: [rows.drafted[r] for r in subset],
        )
        alone = sample(logits[subset], part)
        assert alone.tokens == [together.tokens[r] for r in subset]
        assert alone.logprobs == [together.logprobs[r] for r in subset]
        assert alone.extras == [together.extras[r] for r in subset]


@pytest.mark.parametrize("sizes", [(1, 65), (7, 0, 30, 29), (22, 22, 22)])
def test_logits_in_blocks_give_what_whole_ones_give(sizes):
    """Trees are cut anywhere."""
    rows, logits = random_rows()
    assert sum(sizes) == len(rows)
    blocks = Sampler(rows)
    for block in logits.split(sizes):
        blocks.take(block)
    assert blocks.read() == sample(logits, rows)
    chosen = np.random.default_rng(2).integers(0, VOCAB, len(rows)).tolist()
    scored = Sampler(rows, chosen=chosen)
    for block in logits.split(sizes):
        scored.take(block)
    assert scored.read() == score(logits, rows, chosen)


def test_trees_are_walked_over_blocks():
    batch = decode_batch([make_request([3, 4, 5], temperature=0.0) for _ in range(3)])
    trees = make_trees([([7, 8, 9], [0, 1, 2]), ([], []), ([7, 1, 8], [0, 0, 1])])
    logits = torch.zeros(9, VOCAB)
    for row, token in enumerate([7, 8, 9, 2, 5, 7, 8, 3, 6]):
        logits[row, token] = 9.0
    whole, blocks = TreeSampler(batch, trees), TreeSampler(batch, trees)
    whole.take(logits)
    for block in logits.split((2, 4, 3)):
        blocks.take(block)
    assert whole.read().paths == [[1, 2, 3], [], [1, 3]]
    assert blocks.read().paths == whole.read().paths
    assert blocks.read().sampled == whole.read().sampled


@pytest.mark.parametrize("params", PARAMS)
def test_score_repeats_what_sampling_reported(params):
    request = make_request([4, 5, 6, 7], prompt_len=2, seed=11, eos=(3,), entropy=True, **params)
    output = [8, 4, 9, 9]
    rows = rows_of_continuation(request, output, range(4))
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    scored = score(logits, rows, output)
    for k in range(4):
        step = make_request(
            [4, 5, 6, 7, *output[:k]], prompt_len=2, seed=11, eos=(3,), entropy=True, **params
        )
        again, _ = sample_rows(decode_batch([step]), make_trees([([], [])]))
        assert again.positions_R[0] == rows.positions_R[k]
        own = score(logits[k : k + 1], again, output[k : k + 1])
        assert own.logprobs == scored.logprobs[k : k + 1]
        assert own.extras == scored.extras[k : k + 1]
        drawn = sample(logits[k : k + 1], again)
        redone = score(logits[k : k + 1], again, drawn.tokens)
        assert redone.logprobs == drawn.logprobs


def test_no_tokens_are_scored_as_none():
    """A chunk of a sequence may end before the first token that is scored."""
    for params in PARAMS:
        rows = rows_of_continuation(make_request([1, 2], eos=(3,), **params), [4, 5], range(0))
        scored = score(torch.empty(0, VOCAB), rows, [])
        assert (scored.tokens, scored.logprobs, scored.extras) == ([], [], []), params


def test_of_equally_likely_tokens_the_lowest_are_told():
    """However many are asked for, beside whomever."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, VOCAB)) * 3).round().float()
    requests = [make_request([1, 2], request_id=k, top_logprobs=(3, 0, 20)[k]) for k in range(3)]
    rows, _ = sample_rows(decode_batch(requests), make_trees([([], [])] * 3))
    for row, extra in zip(logits.tolist(), sample(logits, rows).extras, strict=True):
        found = [token for token, _ in extra.top_logprobs[0]] if extra.top_logprobs else []
        assert found == sorted(range(VOCAB), key=lambda k, row=row: (-row[k], k))[: len(found)]


def test_rows_that_are_no_distribution_give_no_token_and_spare_the_others():
    for params in PARAMS:
        requests = [make_request([1, 2], seed=seed, eos=(3,), **params) for seed in range(5)]
        rows, _ = sample_rows(decode_batch(requests), make_trees([([], [])] * 5))
        logits = torch.zeros(5, VOCAB)
        whole = sample(logits, rows)
        logits[1, 17] = math.nan
        logits[2, 5] = math.inf
        logits[3] = -math.inf
        broken = sample(logits, rows)
        assert broken.tokens == [whole.tokens[0], -1, -1, -1, whole.tokens[4]], params
        assert broken.logprobs[4] == whole.logprobs[4], params


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 0.7, 3e38])
def test_no_penalty_makes_a_row_no_distribution(temperature):
    normal = torch.from_numpy(np.random.default_rng(0).normal(size=(1, VOCAB)) * 3).float()
    for params in (
        {"repetition_penalty": 1e-45},
        {"presence_penalty": 3e38, "frequency_penalty": -3e38},
        {"repetition_penalty": 1e-45, "logit_bias": {5: 3e38, 6: -3e38, 7: 3e38}},
        {"repetition_penalty": 3e38, "logit_bias": dict.fromkeys(range(VOCAB), -3e38)},
    ):
        request = make_request(
            [5, 6, 6, 7, 7, 7], prompt_len=2, seed=3, temperature=temperature, **params
        )
        rows, _ = sample_rows(decode_batch([request]), make_trees([([], [])]))
        logits = normal.clone()
        sampled = sample(logits, rows)
        assert 0 <= sampled.tokens[0] < VOCAB, params
        assert math.isfinite(sampled.logprobs[0]), params
        logits[0, 5] = math.nan
        assert sample(logits, rows).tokens == [-1], params
