"""The sampler on the device: against itself on the CPU, and each row against itself alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rollout.ops import gpu
from rollout.ops.transfers import DeviceBuffer
from rollout.ops.tree_accept.reference import walk
from rollout.sampling.rows import rows_of_continuation, sample_rows
from tests.helpers.requests import decode_batch, make_request, make_trees
from tests.helpers.sampled import sample, sample_trees, score

VOCAB = 1100
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "entropy": True},
    {"temperature": 0.7, "top_k": 5, "sampling_logprobs": True, "sampling_mask": True},
    {"temperature": 1.4, "top_p": 0.8, "raw_logprobs": True},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 900, "top_logprobs": 2},
    {"temperature": 0.9, "repetition_penalty": 1.7},
    {"temperature": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.3, "top_logprobs": 4},
    {"temperature": 1.0, "logit_bias": {3: 8.0, 7: -100.0, 1099: 2.5}, "raw_logprobs": True},
    {"temperature": 1.0, "min_new_tokens": 6, "max_new_tokens": 20, "sampling_logprobs": True},
    {"temperature": 0.8, "top_p": 0.7, "repetition_penalty": 0.8, "min_new_tokens": 3,
     "logit_bias": {2: 9.0}, "frequency_penalty": -0.2, "entropy": True, "sampling_mask": True,
     "logprob_token_ids": [1099, 4]},
    {"repetition_penalty": 3e38, "frequency_penalty": -3e38, "logit_bias": {3: 3e38, 5: -3e38}},
]  # fmt: skip
PLAIN = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.6}]


def random_step(params, dtype, device):
    """Requests with trees below them whose tokens repeat, and logits that like few tokens."""
    rng = np.random.default_rng(0)
    requests = [
        make_request(
            rng.integers(0, 12, 9).tolist(), prompt_len=5, seed=int(rng.integers(2**63)), eos=(3,),
            request_id=i, **own,
        )
        for i, own in enumerate(params)
    ]  # fmt: skip
    shapes = [([5, 6, 5, 7, 6], [0, 0, 1, 3, 2]), ([], []), ([4], [0])]
    trees = make_trees([shapes[i % 3] for i in range(len(requests))])
    batch = decode_batch(requests)
    rows, offsets = sample_rows(batch, trees)
    logits = rng.normal(size=(len(rows.requests), VOCAB)) * 3
    logits[:, 3:9] += 6
    return batch, trees, rows, offsets, torch.from_numpy(logits).to(device, dtype)


@pytest.fixture
def cpus(monkeypatch):
    """Calls a function as where there is no GPU."""

    def called(function, logits, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "runs_on", lambda device: device.type == "cuda")
            return function(logits.cpu(), *arguments)

    return called


def assert_near(one, other):
    """Tokens alike, and numbers up to rounding."""
    assert one.tokens == other.tokens
    assert one.logprobs == pytest.approx(other.logprobs, rel=1e-5, abs=1e-5)
    for own, others in zip(one.extras, other.extras, strict=True):
        for name in ("raw_logprobs", "sampling_logprobs", "entropies"):
            values = getattr(others, name)
            assert getattr(own, name) == pytest.approx(values, rel=1e-5, abs=1e-5)
        assert own.sampling_masks == others.sampling_masks
        listed = [*own.top_logprobs, *own.token_ids_logprobs]
        others_listed = [*others.top_logprobs, *others.token_ids_logprobs]
        for tokens, other_tokens in zip(listed, others_listed, strict=True):
            assert [token for token, _ in tokens] == [token for token, _ in other_tokens]
            values = [value for _, value in other_tokens]
            assert [value for _, value in tokens] == pytest.approx(values, rel=1e-5, abs=1e-5)


TIES = [{"top_logprobs": 3}, {"top_logprobs": 20, "repetition_penalty": 1.5}]


@pytest.mark.parametrize("params", [PARAMS, PLAIN, TIES], ids=["shaped", "plain", "ties"])
def test_every_number_is_the_cpus(compared_dtype, device, cpus, params) -> None:
    """And score reports what was drawn. Of equally likely tokens the same are told."""
    _, _, rows, _, logits = random_step(params, compared_dtype, device)
    logits = logits.round() if params is TIES else logits
    sampled = sample(logits, rows)
    assert_near(sampled, cpus(sample, logits, rows))
    assert score(logits, rows, sampled.tokens) == sampled
    assert set(sampled.tokens) - {-1}
    assert any(e != type(e)() for e in sampled.extras) == (params is not PLAIN)
    request = make_request([1, 2, 3], eos=(3,), **params[-1])
    rows = rows_of_continuation(request, [4, 4, 5, 3], range(1, 4))
    assert_near(score(logits[:3], rows, [4, 5, 3]), cpus(score, logits[:3], rows, [4, 5, 3]))


def test_a_row_is_the_same_in_any_company(compared_dtype, device) -> None:
    """Alone, beside rows that ask for nothing, and beside rows whose logits are changed."""
    params = [*PARAMS, *PLAIN]
    batch, trees, rows, offsets, logits = random_step(params, compared_dtype, device)
    together = sample(logits, rows)
    for b in range(0, len(batch.entries), 1 if logits.is_cuda else 3):
        start, end = offsets[b : b + 2]
        batch_of_one = decode_batch([batch.entries[b].request])
        nodes = slice(*trees.offsets_B1[b : b + 2])
        tree = make_trees([(trees.tokens_N[nodes].tolist(), trees.parents_N[nodes].tolist())])
        own_rows, _ = sample_rows(batch_of_one, tree)
        alone = sample(logits[start:end], own_rows)
        assert alone.tokens == together.tokens[start:end]
        assert alone.logprobs == together.logprobs[start:end]
        assert alone.extras == together.extras[start:end]


def test_a_step_is_sampled_and_walked_at_once(device) -> None:
    batch, trees, rows, offsets, logits = random_step(PARAMS, torch.float32, device)
    samples = sample_trees(batch, trees, logits)
    assert samples.sampled == sample(logits, rows)
    assert samples.offsets_B1.tolist() == offsets.tolist()
    for b, path in enumerate(samples.paths):
        nodes = slice(*trees.offsets_B1[b : b + 2])
        own = samples.sampled.tokens[offsets[b] : offsets[b + 1]]
        assert path == walk(trees.tokens_N[nodes], trees.parents_N[nodes], own)
    assert sum(len(path) for path in samples.paths) > 1


@pytest.mark.parametrize(
    ("bad", "own"),
    [(math.nan, PARAMS[0]), (math.inf, PARAMS[1]), (math.nan, PARAMS[2]), (math.inf, PARAMS[8])],
)
def test_rows_without_a_distribution_end_the_path(device, bad, own) -> None:
    batch, trees, _, offsets, logits = random_step([own, own, own], torch.float32, device)
    logits[0, 17] = bad
    logits[7] = -math.inf
    samples = sample_trees(batch, trees, logits)
    first = samples.offsets_B1.tolist()
    assert first == offsets.tolist() == [0, 6, 7, 9]
    assert samples.sampled.tokens[0] == samples.sampled.tokens[7] == -1
    assert all(token >= 0 for row, token in enumerate(samples.sampled.tokens) if row not in (0, 7))
    assert samples.paths[0] == samples.paths[2] == []


def test_a_buffer_keeps_places_and_refuses_what_does_not_fit(device) -> None:
    buffer = DeviceBuffer(64, device)
    pair = {"a": np.array([1, 2], dtype=np.int32), "b": np.array([3], dtype=np.int64)}
    first = buffer.send(pair)
    again = buffer.send({name: array + 1 for name, array in pair.items()})
    for name in pair:
        assert first[name].data_ptr() == again[name].data_ptr()
        assert first[name].data_ptr() % 16 == 0
        assert first[name].tolist() == (pair[name] + 1).tolist()
    other = buffer.send({"b": np.array([0.5]), "a": np.ones((2, 3), dtype=np.float32)})
    assert [tensor.tolist() for tensor in other.values()] == [[0.5], [[1.0] * 3] * 2]
    assert buffer.send({"a": np.zeros(17, dtype=np.int32)}) is None
    assert other["b"].tolist() == [0.5]
