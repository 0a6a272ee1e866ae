"""Routes of rows to experts, and the weighted sums of outputs. Unread memory beside rows is NaN."""

from __future__ import annotations

import pytest
import torch

from rollout.ops.combine_experts import combine_experts
from rollout.ops.routing import Groups, route


@pytest.mark.parametrize(
    ("num_experts", "chosen", "normalizes"),
    [(1, 1, True), (7, 3, False), (64, 8, True), (33, 33, False)],
)
def test_the_most_probable_come_first(dtype, device, num_experts, chosen, normalizes) -> None:
    torch.manual_seed(num_experts)
    # Distinct in every dtype: a shuffled range.
    logits = torch.stack([torch.randperm(num_experts) for _ in range(11)]) / 16
    wide = torch.full((11, num_experts + 3), torch.nan)
    wide[:, :num_experts] = logits
    wide = wide.to(device, dtype)[:, :num_experts]
    experts, weights = route(wide, chosen, normalizes)
    probs, expected = logits.softmax(-1).topk(chosen)
    if normalizes:
        probs /= probs.sum(-1, keepdim=True)
    assert experts.dtype is torch.int32
    assert weights.dtype is torch.float32
    assert torch.equal(experts.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), probs, rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lower_index(dtype, device) -> None:
    rows = {
        (0.0, 2, 1, 2, 2, 1, 0): [1, 3, 4, 2],
        (5.0,) * 7: [0, 1, 2, 3],
        (*[-60_000.0] * 5, 1, 1): [5, 6, 0, 1],
        (*[-torch.inf] * 5, 1, 1): [5, 6, 0, 1],
        (-0.0, 0.0, -1.0, 0.0, -2.0, -3.0, -0.0): [0, 1, 3, 6],
    }
    experts, _ = route(torch.tensor(list(rows)).to(device, dtype), 4, True)
    assert experts.tolist() == list(rows.values())
    logits = torch.tensor([[-300.0, -200.0, 0.0, -250.0]], device=device)  # two have no probability
    experts, weights = route(logits, 3, False)
    assert experts.tolist() == [[2, 1, 3]]
    assert weights.tolist() == [[1, 0, 0]]


def test_a_rows_experts_do_not_depend_on_the_others(dtype, device, rounds, set_threads) -> None:
    torch.manual_seed(0)
    count = rounds(300)
    logits = torch.randn(count, 61).round(decimals=1).to(device, dtype)  # ties
    set_threads(2)
    experts, weights = route(logits, 6, True)
    set_threads(1)
    for rows in (torch.arange(1), torch.arange(count).flip(0), torch.tensor([7, 7, count - 2])):
        some_experts, some_weights = route(logits[rows], 6, True)
        assert torch.equal(some_experts, experts[rows])
        assert torch.equal(some_weights, weights[rows])


@pytest.mark.parametrize("groups", [Groups(), Groups(sigmoid=True, count=3, chosen=2)])
def test_broken_rows_get_experts_that_exist(device, groups) -> None:
    bias = torch.zeros(9, device=device) if groups.sigmoid else None
    for value in (torch.nan, -torch.inf, torch.inf):
        experts, _ = route(torch.full((2, 9), value, device=device), 5, True, groups, bias)
        assert [sorted(row) for row in experts.tolist()] == [[0, 1, 2, 3, 4]] * 2


GROUPED = [  # experts, chosen, normalizes, groups of experts, has a bias
    (12, 4, True, Groups(sigmoid=True, count=3, chosen=2, factor=2.5), True),
    (35, 6, False, Groups(sigmoid=True, count=7, chosen=3), True),
    (9, 3, True, Groups(sigmoid=True, factor=1.8), True),
    (6, 6, False, Groups(sigmoid=True, count=2, chosen=2), False),
    (20, 3, True, Groups(count=5, chosen=2, factor=16.0), False),
]


def grouped_in_float64(logits, chosen: int, normalizes: bool, groups: Groups, bias):
    """Row by row, in Python: sets of experts with their weights."""
    rows = []
    for row in logits.double():
        scores = row.sigmoid() if groups.sigmoid else row.softmax(0)
        order_by = (scores if bias is None else scores + bias.double()).view(groups.count, -1)
        best = order_by.sort(descending=True).values[:, : 2 if groups.sigmoid else 1].sum(1)
        kept = best.topk(groups.chosen).indices
        order_by = torch.full_like(order_by, -1e9).index_copy(0, kept, order_by[kept]).flatten()
        experts = order_by.topk(chosen).indices
        weights = scores[experts] / (scores[experts].sum() if normalizes else 1)
        rows.append((experts, weights * groups.factor))
    return [torch.stack(each) for each in zip(*rows, strict=True)]


@pytest.mark.parametrize(("num_experts", "chosen", "normalizes", "groups", "has_bias"), GROUPED)
def test_groups_limit_the_choice(device, num_experts, chosen, normalizes, groups, has_bias) -> None:
    torch.manual_seed(num_experts)
    wide = torch.full((19, num_experts + 3), torch.nan)
    wide[:, :num_experts] = logits = torch.randn(19, num_experts) * 2
    bias = torch.randn(num_experts) if has_bias else None
    wide, on_device = wide.to(device), bias.to(device) if has_bias else None
    experts, weights = route(wide[:, :num_experts], chosen, normalizes, groups, on_device)
    expected, expected_weights = grouped_in_float64(logits, chosen, normalizes, groups, bias)
    assert torch.equal(experts.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights.float(), rtol=1e-5, atol=1e-7)
    some = route(wide[[7, 3]][:, :num_experts], chosen, normalizes, groups, on_device)
    assert torch.equal(some[0], experts[[7, 3]])
    assert torch.equal(some[1], weights[[7, 3]])


def operands(dtype, device, rows, ranks, hidden):
    generator = torch.Generator().manual_seed(hidden)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weights = random(rows, ranks).float().softmax(1)
    return random(rows, ranks, hidden), weights, random(rows, hidden), random(rows, 3)[:, 1]


@pytest.mark.parametrize(("rows", "ranks", "hidden"), [(1, 1, 1), (5, 3, 37), (3, 8, 1030)])
def test_the_sum_of_all_experts(dtype, device, rows, ranks, hidden) -> None:
    outputs, weights, shared, gate = operands(dtype, device, rows, ranks, hidden)
    exact = (outputs.double() * weights.double()[:, :, None]).sum(1)
    gated = exact + shared.double() * gate.double().sigmoid()[:, None]
    rtol = 1e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    for found, wanted in (
        (combine_experts(outputs, weights), exact),
        (combine_experts(outputs, weights, shared), exact + shared.double()),
        (combine_experts(outputs, weights, shared, gate), gated),
    ):
        assert found.dtype is dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=1e-6)


def test_a_rows_sum_does_not_depend_on_the_others(dtype, device, set_threads) -> None:
    operands_of_all = operands(dtype, device, 27, 5, 203)
    set_threads(2)
    together = combine_experts(*operands_of_all)
    set_threads(1)
    for rows in (*torch.arange(27).split(1), torch.arange(27).flip(0), torch.arange(0)):
        assert torch.equal(combine_experts(*(x[rows] for x in operands_of_all)), together[rows])
