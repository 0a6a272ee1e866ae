"""Noise, truncation and the draw, against their references."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

from rollout.ops.categorical import reference
from rollout.ops.categorical.triton import categorical, entropy, token_logprobs
from rollout.ops.truncation import reference as truncation_reference
from rollout.ops.truncation import triton as truncation_on_a_gpu
from rollout.ops.truncation.triton import truncation_threshold
from rollout.ops.uniforms import reference as uniforms_reference
from rollout.ops.uniforms.triton import uniforms

ALMOST_ONE = math.nextafter(1.0, 0.0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def test_the_noise_is_bitwise_the_reference(device) -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(0, 2**64, 200, dtype=np.uint64)
    seeds[:4] = [0, 1, 2**63, 2**64 - 1]
    positions = generator.integers(0, 2**40, 200)
    positions[:4] = [0, 1, 2, 2**62]
    expected = uniforms_reference.noise(seeds, positions).tolist()
    on_device = [torch.from_numpy(a).to(device) for a in (seeds.view(np.int64), positions)]
    assert uniforms(*on_device).tolist() == expected
    assert uniforms_reference.uniforms(*on_device).tolist() == expected
    assert uniforms(*(a[:0] for a in on_device)).tolist() == []


def make_rows(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits with some tokens impossible, mixed temperatures, uniforms."""
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab) * 4
    logits[:, 1:][torch.rand(rows, vocab - 1) < 0.2] = -torch.inf
    temperature = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.7, 100.0])[torch.arange(rows) % 6]
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[:6], uniform[6:12] = 0.0, ALMOST_ONE
    return logits.to(dtype), temperature, uniform


@pytest.mark.parametrize("vocab", [1, 15, 1000, 1024, 3003])
def test_categorical_is_the_reference(dtype, device, vocab: int) -> None:
    rows = make_rows(18, vocab, dtype)
    logits, temperature, uniform = (tensor.to(device) for tensor in rows)
    tokens, logprobs = categorical(logits, temperature, uniform)
    expected_tokens, _ = reference.categorical(*rows)
    # At u just below 1 rounding decides among the last tokens; the others have to agree.
    inner = rows[2] != ALMOST_ONE
    assert torch.equal(tokens.cpu()[inner], expected_tokens[inner])
    assert logits.gather(1, tokens.unsqueeze(1)).isfinite().all()
    expected = reference.token_logprobs(*rows[:2], tokens.cpu())
    torch.testing.assert_close(logprobs.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(token_logprobs(logits, temperature, tokens), logprobs)
    torch.testing.assert_close(
        entropy(logits, temperature).cpu(), reference.entropy(*rows[:2]), rtol=4e-6, atol=4e-6
    )


@pytest.mark.parametrize("vocab", [15, 2100])
def test_truncated_draws_are_the_reference(dtype, device, vocab: int) -> None:
    rows = make_rows(18, vocab, dtype)
    threshold = rows[0].float().quantile(0.8, dim=1)
    tokens, logprobs = categorical(*(t.to(device) for t in rows), threshold.to(device))
    kept = rows[0].masked_fill(rows[0] < threshold[:, None], -torch.inf)
    expected_tokens, _ = reference.categorical(kept, *rows[1:])
    expected = reference.token_logprobs(*rows[:2], expected_tokens)
    inner = rows[2] != ALMOST_ONE
    assert torch.equal(tokens.cpu()[inner], expected_tokens[inner])
    torch.testing.assert_close(logprobs.cpu()[inner], expected[inner], rtol=1e-6, atol=1e-6)
    drawn = rows[0].gather(1, tokens.cpu().unsqueeze(1)).squeeze(1).float()
    assert (drawn >= threshold).all()


def test_draws_have_the_distribution_of_the_logits(device) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(60, generator=generator) * 2
    logits[::3] = -torch.inf
    draws = 300 if INTERPRETED else 200_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=generator)
    temperature = torch.full((draws,), 1.5)
    arguments = (logits.expand(draws, -1), temperature, uniform)
    tokens = categorical(*(tensor.to(device) for tensor in arguments))[0].cpu()
    counts = torch.bincount(tokens, minlength=60)
    assert not counts[::3].any()
    possible = logits.isfinite()
    expected = torch.softmax(logits.double() / 1.5, 0)[possible] * draws
    assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 0.01


def test_greedy_takes_the_first_of_equals_and_reports_temperature_one(dtype, device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 2100).to(dtype)
    for row, places in enumerate([(0, 2099), (1023, 1024), (1024, 1025), (2098, 2099)]):
        logits[row, list(places)] = 9
    logits, zeros = logits.to(device), torch.zeros(4, device=device)
    tokens, logprobs = categorical(logits, zeros, zeros.double() + 0.9)
    assert tokens.tolist() == [0, 1023, 1024, 2098]
    assert torch.equal(logprobs, token_logprobs(logits, zeros + 1, tokens))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1023, 1024])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_is_marked(device, bad, place, temperature) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 1030).to(device)
    logits[1, place] = bad
    logits[3] = -torch.inf
    temperatures = torch.full((4,), temperature, device=device)
    uniform = torch.rand(4, dtype=torch.float64).to(device)
    for threshold in (None, torch.full((4,), -1.0, device=device)):
        tokens, logprobs = categorical(logits, temperatures, uniform, threshold)
        assert (tokens >= 0).tolist() == [True, False, True, False]
        assert tokens[[1, 3]].tolist() == [-1, -1]
        assert logprobs.isnan().tolist() == [False, True, False, True]
    assert entropy(logits, temperatures).isnan().tolist() == [False, True, False, True]


def test_rows_do_not_depend_on_each_other(dtype, device) -> None:
    rows = make_rows(8, 2500, dtype)
    logits, temperature, uniform = (tensor.to(device) for tensor in rows)
    tokens, logprobs = categorical(logits, temperature, uniform)
    wide = torch.full((8, 2600), torch.nan, dtype=dtype, device=device)
    wide[:, 50:2550] = logits
    for row in (0, 3, 7):
        one = slice(row, row + 1)
        token, logprob = categorical(wide[one, 50:2550], temperature[one], uniform[one])
        assert token == tokens[row]
        assert logprob == logprobs[row]


@pytest.mark.parametrize("token", [-1, 8])
def test_a_token_outside_the_vocabulary_has_no_logprob(device, token: int) -> None:
    one = torch.ones(1, device=device)
    tokens = torch.tensor([token], device=device)
    assert token_logprobs(torch.randn(1, 8, device=device), one, tokens).isnan().all()


@pytest.mark.parametrize(("vocab", "most"), [(5, 16384), (1500, 16384), (9000, 16384), (5000, 30)])
def test_thresholds_are_the_reference(device, monkeypatch, vocab: int, most: int) -> None:
    """All ways to cut, alone and together, with ties and impossible tokens.

    ``most``: tokens of a row that are written down; where more matter they are looked up again.
    """
    monkeypatch.setattr(truncation_on_a_gpu, "_MAX_FOUND", most)
    torch.manual_seed(vocab)
    cuts = [
        (k, p, m) for k in (0, 1, 3, 40, 5000) for p in (1.0, 0.9, 0.3) for m in (0.0, 0.05)
    ]  # fmt: skip
    if INTERPRETED:
        cuts = cuts[:: 2 if vocab < 1000 else 5]
    spread = torch.tensor([3.0, 0.3])[torch.arange(len(cuts)) % 2]
    logits = (torch.randn(len(cuts), vocab) * spread[:, None]).round(decimals=1)  # ties
    logits[:, 1::4] = -torch.inf
    temperature = torch.tensor([0.0, 0.6, 1.0, 2.0])[torch.arange(len(cuts)) % 4]
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*cuts, strict=True))
    arguments = (logits, temperature, top_k, top_p, min_p)
    out = truncation_threshold(*(tensor.to(device) for tensor in arguments)).cpu()
    threshold = truncation_reference.truncation_threshold(*arguments)
    for row, cut in enumerate(cuts):
        kept, wanted = logits[row] >= out[row], logits[row] >= threshold[row]
        assert torch.equal(kept & logits[row].isfinite(), wanted & logits[row].isfinite()), cut


def test_thresholds_far_below_the_top(device) -> None:
    """Where no bin tells tokens apart."""
    torch.manual_seed(0)
    logits = torch.randn(2, 4200).round(decimals=2)
    logits[:, 7] = 1000.0
    k, off = torch.tensor([2, 100]), torch.ones(2)
    threshold = truncation_threshold(*(t.to(device) for t in (logits, off, k, off, 0 * off)))
    expected = logits.sort(dim=1, descending=True).values[[0, 1], k - 1]
    assert torch.equal(threshold.cpu(), expected)


def test_a_threshold_is_the_same_alone_and_in_company(device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4200, device=device) * 3
    logits[1] = torch.nan
    half, ones = torch.full((3,), 0.5, device=device), torch.ones(3, device=device)
    k = torch.full((3,), 50, device=device)
    together = truncation_threshold(logits, ones, k, half, 0 * ones)
    alone = [truncation_threshold(logits[r:r+1], ones[:1], k[:1], half[:1], 0 * ones[:1]) for r in (0, 2)]  # fmt: skip  # noqa: E501
    assert together[[0, 2]].tolist() == [float(a) for a in alone]
