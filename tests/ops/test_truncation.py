"""Thresholds against a sort of the whole row, on the CPU and on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from rollout.ops.truncation import reference, truncation_threshold

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def kept_by_a_sort(logits_V, temperature, top_k, top_p, min_p) -> torch.Tensor:
    """A mask of the tokens that stay, straight from the definition."""
    logits = logits_V.double()
    least = logits.new_full((), -torch.inf)
    if 0 < top_k < len(logits):
        least = logits.sort(descending=True).values[top_k - 1]
    probs = (logits / (temperature or 1.0)).softmax(0)
    order = logits.argsort(descending=True)[: top_k if top_k > 0 else None]
    if top_p < 1:
        before = probs[order].cumsum(0) - probs[order]
        last = int((before < top_p * probs[order].sum()).sum())
        least = torch.maximum(least, logits[order[last - 1]])
    kept = logits >= least
    if min_p:
        kept &= probs >= min_p * probs.max() * (1 - 1e-6)
    return kept & logits.isfinite()


@pytest.mark.parametrize(("vocab", "most"), [(5, 16384), (1500, 16384), (9000, 16384), (5000, 30)])
def test_thresholds_are_those_of_a_sort(device, monkeypatch, vocab: int, most: int) -> None:
    """All ways to cut, alone and together, with ties and impossible tokens.

    ``most``: tokens of a row that a GPU writes down; where more matter they are looked up again.
    """
    if INTERPRETED or device.type == "cuda":
        from rollout.ops.truncation import triton

        monkeypatch.setattr(triton, "_MAX_FOUND", most)
    torch.manual_seed(vocab)
    cuts = [(k, p, m) for k in (0, 1, 3, 40, 5000) for p in (1.0, 0.9, 0.3) for m in (0.0, 0.05)]
    if INTERPRETED:
        cuts = cuts[:: 2 if vocab < 1000 else 5]
    spread = torch.tensor([3.0, 0.3])[torch.arange(len(cuts)) % 2]
    logits = (torch.randn(len(cuts), vocab) * spread[:, None]).round(decimals=1)  # ties
    logits[:, 1::4] = -torch.inf
    temperature = torch.tensor([0.0, 0.6, 1.0, 2.0])[torch.arange(len(cuts)) % 4]
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*cuts, strict=True))
    arguments = (logits, temperature, top_k, top_p, min_p)
    out = truncation_threshold(*(tensor.to(device) for tensor in arguments)).cpu()
    expected = reference.truncation_threshold(*arguments)
    for row, cut in enumerate(cuts):
        wanted = kept_by_a_sort(logits[row], float(temperature[row]), *cut)
        for threshold in (out, expected):
            kept = (logits[row] >= threshold[row]) & logits[row].isfinite()
            assert torch.equal(kept, wanted), cut


def test_top_k_alone_keeps_tokens_too_unlikely_to_add_to_the_sum(device) -> None:
    """The gap is so wide that no histogram tells the lower tokens apart."""
    torch.manual_seed(0)
    logits = torch.randn(2, 4200).round(decimals=2)
    logits[:, 7] = 1000.0
    k, off = torch.tensor([2, 100]), torch.ones(2)
    threshold = truncation_threshold(*(t.to(device) for t in (logits, off, k, off, 0 * off)))
    expected = logits.sort(dim=1, descending=True).values[[0, 1], k - 1]
    assert torch.equal(threshold.cpu(), expected)


def test_a_threshold_is_the_same_alone_and_in_company(dtype, device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 4200) * 3
    logits[1] = torch.nan
    half, ones = torch.full((3,), 0.5), torch.ones(3)
    arguments = (logits.to(dtype), ones, torch.full((3,), 50), half, 0 * ones)
    arguments = [each.to(device) for each in arguments]
    together = truncation_threshold(*arguments)
    for row in (0, 2):
        alone = truncation_threshold(*(each[row : row + 1] for each in arguments))
        assert torch.equal(alone, together[row : row + 1])
