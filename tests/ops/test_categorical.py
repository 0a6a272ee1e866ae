from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

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


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 255, 256, 257, 1000, 5003])
def test_categorical_is_the_reference(dtype: torch.dtype, vocab: int) -> None:
    logits, temperature, uniform = make_rows(30, vocab, dtype)
    assert native.supports(logits)
    tokens, logprobs = categorical(logits, temperature, uniform)
    expected_tokens, _ = reference.categorical(logits, temperature, uniform)
    # At u just below 1 rounding decides among the last tokens; the others have to agree.
    inner = uniform != ALMOST_ONE
    assert torch.equal(tokens[inner], expected_tokens[inner])
    assert logits.gather(1, tokens.unsqueeze(1)).isfinite().all()
    expected = reference.token_logprobs(logits, temperature, tokens)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(token_logprobs(logits, temperature, tokens), logprobs)
    torch.testing.assert_close(
        entropy(logits, temperature), reference.entropy(logits, temperature), rtol=2e-6, atol=2e-6
    )


def test_draws_have_the_distribution_of_the_logits() -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(600, generator=generator) * 2
    logits[::3] = -torch.inf
    draws = 200_000
    uniform = torch.rand(draws, dtype=torch.float64, generator=generator)
    temperature = torch.full((draws,), 1.5)
    tokens, _ = categorical(logits.expand(draws, -1), temperature, uniform)
    counts = torch.bincount(tokens, minlength=600)
    assert not counts[::3].any()
    possible = logits.isfinite()
    expected = torch.softmax(logits.double() / 1.5, 0)[possible] * draws
    assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 0.01


def test_every_token_owns_the_interval_of_its_probability() -> None:
    probs = torch.tensor([0.0, 0.125, 0.0, 0.25, 0.5, 0.125, 0.0])
    for u, token in [(0, 1), (0.12, 1), (0.13, 3), (0.37, 3), (0.38, 4), (0.87, 4), (0.88, 5),
                     (ALMOST_ONE, 5)]:  # fmt: skip
        tokens, _ = categorical(
            probs.log().unsqueeze(0), torch.ones(1), torch.tensor([u], dtype=torch.float64)
        )
        assert tokens.item() == token


@pytest.mark.parametrize("u", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("place", [0, 255, 256, 300])
def test_the_only_possible_token_is_drawn(u: float, temperature: float, place: int) -> None:
    logits = torch.full((1, 301), -torch.inf)
    logits[0, place] = -3
    tokens, logprobs = categorical(
        logits, torch.tensor([temperature]), torch.tensor([u], dtype=torch.float64)
    )
    assert tokens.item() == place
    assert logprobs.item() == 0


def test_greedy_takes_the_first_of_equals_and_reports_temperature_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 700).to(dtype)
    for row, places in enumerate([(0, 699), (255, 256), (256, 257, 258), (698, 699)]):
        logits[row, list(places)] = 9
    greedy = categorical(logits, torch.zeros(4), torch.full((4,), 0.9, dtype=torch.float64))
    assert greedy[0].tolist() == [0, 255, 256, 698]
    assert torch.equal(greedy[1], token_logprobs(logits, torch.ones(4), greedy[0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5, 300, 301])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_distribution_is_marked(bad: float, place: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 302)
    logits[1, place] = bad
    tokens, logprobs = categorical(
        logits, torch.full((3,), temperature), torch.rand(3, dtype=torch.float64)
    )
    assert tokens[1] == -1
    assert (tokens[[0, 2]] >= 0).all()
    assert logprobs.isnan().tolist() == [False, True, False]
    assert entropy(logits, torch.ones(3)).isnan().tolist() == [False, True, False]


def test_nothing_above_minus_infinity_is_marked() -> None:
    logits = torch.full((1, 20), -torch.inf)
    tokens, logprobs = categorical(logits, torch.ones(1), torch.zeros(1, dtype=torch.float64))
    assert tokens.item() == -1
    assert logprobs.isnan().all()


def test_rows_do_not_depend_on_each_other(dtype: torch.dtype, set_threads) -> None:
    logits, temperature, uniform = make_rows(40, 3000, dtype)
    set_threads(2)
    tokens, logprobs = categorical(logits, temperature, uniform)
    entropies = entropy(logits, temperature)
    set_threads(1)
    wide = torch.full((40, 3100), torch.nan, dtype=dtype)
    wide[:, 50:3050] = logits
    for row in torch.randperm(40).tolist():
        one = slice(row, row + 1)
        token, logprob = categorical(wide[one, 50:3050], temperature[one], uniform[one])
        assert token == tokens[row]
        assert logprob == logprobs[row]
        assert entropy(logits[one], temperature[one]) == entropies[row]


@pytest.mark.parametrize("vocab", [15, 2100])
@pytest.mark.parametrize("share", [0.0, 0.8])
def test_truncated_draws_are_the_reference_and_those_of_masked_logits(
    dtype: torch.dtype, vocab: int, share: float
) -> None:
    logits, temperature, uniform = make_rows(30, vocab, dtype)
    threshold = logits.float().quantile(share, dim=1)
    tokens, logprobs = categorical(logits, temperature, uniform, threshold)
    masked = logits.masked_fill(logits < threshold[:, None], -torch.inf)
    assert torch.equal(tokens, categorical(masked, temperature, uniform)[0])
    assert torch.equal(logprobs, token_logprobs(logits, temperature, tokens))
    expected, _ = reference.categorical(logits, temperature, uniform, threshold)
    inner = uniform != ALMOST_ONE
    assert torch.equal(tokens[inner], expected[inner])


def test_logprobs_of_several_tokens_of_a_row(dtype: torch.dtype) -> None:
    logits, temperature, _ = make_rows(6, 300, dtype)
    tokens = torch.randint(0, 300, (6, 4))
    tokens[2, 1] = -1
    found = token_logprobs(logits, temperature, tokens)
    each = [token_logprobs(logits, temperature, column) for column in tokens.unbind(1)]
    assert torch.equal(found.nan_to_num(), torch.stack(each, dim=1).nan_to_num())
    assert found.isnan().nonzero().tolist() == [[2, 1]]
    expected = reference.token_logprobs(logits, temperature, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert token_logprobs(logits, temperature, tokens[:, :0]).shape == (6, 0)


@pytest.mark.parametrize("token", [-2, 8])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(IndexError, match="tokens_R"):
        token_logprobs(torch.randn(1, 8), torch.ones(1), torch.tensor([token]))
