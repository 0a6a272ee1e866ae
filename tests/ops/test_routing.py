from __future__ import annotations

import pytest
import torch

from rollout.ops.routing import route


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize(("num_experts", "chosen"), [(1, 1), (7, 3), (128, 8), (129, 129)])
def test_the_most_probable_come_first(dtype, num_experts, chosen, normalizes) -> None:
    torch.manual_seed(num_experts)
    # Distinct in every dtype: a shuffled range.
    logits = torch.stack([torch.randperm(num_experts) for _ in range(11)]) / 16
    wide = torch.full((11, num_experts + 3), torch.nan)
    wide[:, :num_experts] = logits
    experts, weights = route(wide.to(dtype)[:, :num_experts], chosen, normalizes)
    probs, expected = logits.softmax(-1).topk(chosen)
    if normalizes:
        probs /= probs.sum(-1, keepdim=True)
    assert experts.dtype is torch.int32
    assert weights.dtype is torch.float32
    assert torch.equal(experts.long(), expected)
    torch.testing.assert_close(weights, probs, rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lower_index(dtype) -> None:
    logits = torch.tensor([[0.0, 2, 1, 2, 2, 1, 0], [5.0] * 7, [-torch.inf] * 5 + [1, 1]])
    experts, _ = route(logits.to(dtype), 4, True)
    assert experts.tolist() == [[1, 3, 4, 2], [0, 1, 2, 3], [5, 6, 0, 1]]


def test_logits_decide_where_probabilities_are_equal() -> None:
    experts, weights = route(torch.tensor([[-300.0, -200.0, 0.0, -250.0]]), 3, False)
    assert experts.tolist() == [[2, 1, 3]]
    assert weights.tolist() == [[1, 0, 0]]


def test_rows_do_not_depend_on_each_other(dtype, set_threads) -> None:
    torch.manual_seed(0)
    logits = torch.randn(300, 61).to(dtype)
    set_threads(2)
    experts, weights = route(logits, 6, True)
    set_threads(1)
    for rows in (torch.arange(1), torch.arange(299, -1, -1), torch.tensor([7, 7, 250])):
        some_experts, some_weights = route(logits[rows], 6, True)
        assert torch.equal(some_experts, experts[rows])
        assert torch.equal(some_weights, weights[rows])


def test_broken_rows_get_experts_that_exist() -> None:
    experts, _ = route(torch.full((3, 5), torch.nan), 2, True)
    assert ((experts >= 0) & (experts < 5)).all()


def test_no_rows() -> None:
    experts, weights = route(torch.empty(0, 5), 2, True)
    assert experts.shape == weights.shape == (0, 2)
