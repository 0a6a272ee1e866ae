"""Guesses, compiled and on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from rollout.ops.draft_guesses import GuessInputs, draft_guesses, reference

TREES, LEVELS = 5, 3


def some_inputs(generator: torch.Generator, device: torch.device) -> GuessInputs:
    """Greedy trees among the others."""
    temperature_P = 0.3 + 2 * torch.rand(TREES, generator=generator)
    is_greedy_P = torch.arange(TREES) % 3 == 2
    return GuessInputs(
        temperature_P=torch.where(is_greedy_P, 1.0, temperature_P).to(device),
        near_P=torch.where(is_greedy_P, 1.0, 0.25).to(device),
        uniforms_PL=torch.rand(TREES, LEVELS, generator=generator).to(device),
        ratios_L=(torch.rand(LEVELS, generator=generator) + 0.4).to(device),
    )


@pytest.mark.parametrize("size", [1, 3, 31, 257, 1024, 3001])
@pytest.mark.parametrize("rows", [0, 1, 23])
def test_guesses_are_the_references(device, dtype, size, rows) -> None:
    generator = torch.Generator().manual_seed(size)
    padded_RD = 4 * torch.randn(rows, size + 5, generator=generator).to(device, dtype)
    logits_RD = padded_RD[:, :size]
    trees_R = torch.randint(TREES, (rows,), generator=generator).to(device)
    levels_R = torch.randint(LEVELS, (rows,), generator=generator).to(device)
    inputs, count = some_inputs(generator, device), min(4, size)
    token_ids_D = torch.randperm(size, generator=generator).to(device)
    for level, ids_D in ((1, None), (levels_R, token_ids_D)):
        given = logits_RD, inputs, trees_R, level, ids_D
        tokens, probs = draft_guesses(*given, 4)
        wanted_tokens, wanted = reference.draft_guesses(*given, count)
        torch.testing.assert_close(probs, wanted, rtol=1e-4, atol=1e-6)
        # Tokens of equal guesses may come in another order.
        is_apart = (wanted[:, 1:] - wanted[:, :-1]).abs() > 1e-5
        is_sure = torch.ones_like(wanted, dtype=torch.bool)
        is_sure[:, 1:] &= is_apart
        is_sure[:, :-1] &= is_apart
        is_sure[:, -1:] = False  # what comes behind it is not known
        assert torch.equal(tokens[is_sure], wanted_tokens[is_sure])
        assert tokens.shape == wanted_tokens.shape == (rows, count)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_has_no_guesses_and_others_have_theirs(device, poison) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RD = torch.randn(4, 500, generator=generator).to(device)
    given = some_inputs(generator, device), torch.arange(4, device=device), 0, None, 3
    clean = draft_guesses(logits_RD, *given)
    logits_RD[1, 499] = poison
    logits_RD[2] = -torch.inf
    tokens, probs = draft_guesses(logits_RD, *given)
    assert probs[1:3].isnan().all()
    for found, wanted in zip((tokens, probs), clean, strict=True):
        assert torch.equal(found[::3], wanted[::3])


def test_tokens_without_a_chance_are_passed_over(device) -> None:
    logits_RD = torch.full((1, 300), -torch.inf, device=device)
    logits_RD[0, 7], logits_RD[0, 290] = 1.0, 2.0
    inputs = some_inputs(torch.Generator().manual_seed(1), device)
    trees_R = torch.tensor([2], device=device)
    tokens, probs = draft_guesses(logits_RD, inputs, trees_R, 0, None, 4)
    assert tokens[0, :2].tolist() == [290, 7]
    assert (probs[0, 2:] == 0).all()
