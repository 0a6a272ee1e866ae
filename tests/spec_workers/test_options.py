"""Checks of workers' options."""

from __future__ import annotations

import pytest

from rollout.errors import InvalidInputError
from spec_workers.options import check_topk


@pytest.mark.parametrize(("topk", "num_steps"), [(63, 1), (63, 2), (31, 3), (1, 64), (21, 4)])
def test_as_many_nodes_are_expanded_as_a_mask_holds(topk, num_steps):
    check_topk(topk, num_steps)


@pytest.mark.parametrize(
    ("topk", "num_steps", "most"), [(64, 1, 63), (32, 3, 31), (22, 4, 21), (0, 4, 63), (1.5, 2, 63)]
)
def test_more_are_refused_with_the_most_there_can_be(topk, num_steps, most):
    with pytest.raises(InvalidInputError, match=rf"spec\.topk.*{most}"):
        check_topk(topk, num_steps)
