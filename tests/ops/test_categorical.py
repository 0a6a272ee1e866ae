"""Draws, logprobs and entropies against their reference, on the CPU and on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from rollout.ops import gpu
from rollout.ops.categorical import categorical, entropy, native, reference, token_logprobs

ALMOST_ONE = math.nextafter(1.0, 0.0)


def make_rows(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits with some tokens impossible, mixed temperatures, uniforms."""
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab) * 4
    logits[:, 1:][torch.rand(rows, vocab - 1) < 0.2] = -torch.inf
    temperature = torch.tensor([0.0, 0.3, 0.7, 1.0, 1.7, 100.0])[torch.arange(rows) % 6]
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[:6], uniform[6:12] = 0.0, ALMOST_ONE
    return logits.to(dtype), temperature, uniform


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        actual.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize(
    ("vocab", "share"), [(1, None), (2, None), (256, 0.8), (257, None), (2503, None), (2503, 0.8)]
)
def test_draws_are_the_reference(dtype, device, vocab: int, share: float | None) -> None:
    """``share``: of tokens below a threshold."""
    rows = make_rows(18, vocab, dtype)
    threshold = None
    if share is not None:
        threshold = rows[0].float().clamp(min=-1e9).quantile(share, dim=1)
    logits, temperature, uniform = (tensor.to(device) for tensor in rows)
    cut = None if threshold is None else threshold.to(device)
    assert native.supports(logits) or gpu.supports(logits)
    tokens, logprobs = categorical(logits, temperature, uniform, cut)
    expected_tokens, _ = reference.categorical(*rows, threshold)
    # At u just below 1 rounding decides among the last tokens; the others have to agree.
    inner = rows[2] != ALMOST_ONE
    assert torch.equal(tokens.cpu()[inner], expected_tokens[inner])
    assert logits.gather(1, tokens.unsqueeze(1)).isfinite().all()
    assert_near(logprobs, reference.token_logprobs(*rows[:2], tokens.cpu()))
    assert torch.equal(token_logprobs(logits, temperature, tokens), logprobs)
    if cut is not None:
        masked = logits.masked_fill(logits < cut[:, None], -torch.inf)
        assert torch.equal(tokens, categorical(masked, temperature, uniform)[0])
        assert (logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float() >= cut).all()
    assert_near(entropy(logits, temperature), reference.entropy(*rows[:2]), 4e-6)


def test_logprobs_of_several_tokens_of_a_row(dtype, device) -> None:
    logits, temperature, _ = make_rows(6, 300, dtype)
    tokens = torch.randint(0, 300, (6, 4))
    tokens[2, 1] = -1
    on_device = [tensor.to(device) for tensor in (logits, temperature, tokens)]
    found = token_logprobs(*on_device)
    each = [token_logprobs(*on_device[:2], column) for column in on_device[2].unbind(1)]
    assert_near(found, torch.stack(each, dim=1).cpu(), 0)
    assert found.isnan().nonzero().tolist() == [[2, 1]]
    assert_near(found, reference.token_logprobs(logits, temperature, tokens))
    assert token_logprobs(*on_device[:2], on_device[2][:, :0]).shape == (6, 0)


def test_every_token_owns_the_interval_of_its_probability(device) -> None:
    probs = torch.tensor([0.0, 0.125, 0.0, 0.25, 0.5, 0.125, 0.0])
    uniform = torch.tensor([0, 0.12, 0.13, 0.37, 0.38, 0.87, 0.88, ALMOST_ONE], dtype=torch.float64)
    arguments = (probs.log().expand(8, -1), torch.ones(8), uniform)
    tokens, _ = categorical(*(tensor.to(device) for tensor in arguments))
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4, 5, 5]


def test_the_only_possible_token_is_drawn(device) -> None:
    places, uniform = [0, 255, 256, 300], torch.tensor([0.0, 0.5, ALMOST_ONE], dtype=torch.float64)
    logits = torch.full((4, 301), -torch.inf)
    logits[torch.arange(4), places] = -3
    temperature = torch.tensor([0.0, 1e-6, 1.0, 1e6])
    for shift in range(4):
        for u in uniform:
            arguments = (logits, temperature.roll(shift), u.expand(4).contiguous())
            tokens, logprobs = categorical(*(tensor.to(device) for tensor in arguments))
            assert tokens.tolist() == places
            assert not logprobs.any()


def test_greedy_takes_the_first_of_equals_and_reports_temperature_one(dtype, device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 2100).to(dtype)
    first = [(0, 2099), (255, 256), (256, 257, 258), (1023, 1024), (1024, 1025), (2098, 2099)]
    for row, places in enumerate(first):
        logits[row, list(places)] = 9
    logits, zeros = logits.to(device), torch.zeros(6, device=device)
    tokens, logprobs = categorical(logits, zeros, zeros.double() + 0.9)
    assert tokens.tolist() == [places[0] for places in first]
    assert torch.equal(logprobs, token_logprobs(logits, zeros + 1, tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_is_marked(device, temperature) -> None:
    torch.manual_seed(0)
    bad = [(0, torch.nan), (300, torch.inf), (1023, torch.inf), (1024, torch.nan)]
    logits = torch.randn(2 * len(bad) + 1, 1030)
    for row, (place, value) in enumerate(bad):
        logits[2 * row + 1, place] = value
    logits[-1] = -torch.inf
    rows = len(logits)
    is_bad = torch.tensor([row % 2 == 1 or row == rows - 1 for row in range(rows)])
    logits, temperatures = logits.to(device), torch.full((rows,), temperature, device=device)
    uniform = torch.rand(rows, dtype=torch.float64).to(device)
    for threshold in (None, torch.full((rows,), -1.0, device=device)):
        tokens, logprobs = categorical(logits, temperatures, uniform, threshold)
        assert torch.equal(tokens.cpu() == -1, is_bad)
        assert torch.equal(logprobs.cpu().isnan(), is_bad)
    assert torch.equal(entropy(logits, temperatures).cpu().isnan(), is_bad)


def test_rows_do_not_depend_on_each_other(dtype, device, set_threads) -> None:
    rows = make_rows(40, 2500, dtype)
    logits, temperature, uniform = (tensor.to(device) for tensor in rows)
    set_threads(2)
    tokens, logprobs = categorical(logits, temperature, uniform)
    entropies = entropy(logits, temperature)
    set_threads(1)
    wide = torch.full((40, 2600), torch.nan, dtype=dtype, device=device)
    wide[:, 50:2550] = logits
    for row in (0, 3, 7, 39):
        one = slice(row, row + 1)
        token, logprob = categorical(wide[one, 50:2550], temperature[one], uniform[one])
        assert token == tokens[row]
        assert logprob == logprobs[row]
        assert entropy(logits[one], temperature[one]) == entropies[row]
