"""Rows of logits are added up in one order, whatever their dtype and whatever else is asked for.

One request with a penalty has its logits as float32, and how a sum is shared out among threads goes
by what is loaded. The interpreter adds in an order of its own and cannot see it.
"""

from __future__ import annotations

import pytest
import torch

from rollout.ops.categorical import categorical, entropy, token_logprobs
from rollout.ops.truncation import truncation_threshold
from tests.helpers.additions import Addition, differing, differing_sums
from tests.helpers.fake_cuda import FakeGpu


@pytest.mark.parametrize("vocab", [128_256, 32_003, 1104, 97])
def test_logits_of_any_dtype_are_added_up_alike(gpu: FakeGpu, vocab) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits_RV = torch.empty((4, vocab), dtype=dtype, device="cuda")
        ones_R = torch.empty(4, dtype=torch.float32, device="cuda")
        k_R = torch.empty(4, dtype=torch.int64, device="cuda")
        for threshold_R in (None, truncation_threshold(logits_RV, ones_R, k_R, ones_R, ones_R)):
            tokens_R, _ = categorical(logits_RV, ones_R, ones_R.double(), threshold_R)
        token_logprobs(logits_RV, ones_R, tokens_R)
        entropy(logits_RV, ones_R)
    launches = gpu.launches.distinct()
    assert {"_sums_kernel", "_draw_kernel", "_entropy_kernel"} <= {each.name for each in launches}
    assert not differing_sums(launches)


def test_rows_that_lie_unlike_others_are_refused(gpu: FakeGpu) -> None:
    logits_RV = torch.empty(4 * 1104 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(4, 1104)
    with pytest.raises(ValueError, match="16 bytes"):
        entropy(logits_RV, torch.empty(4, dtype=torch.float32, device="cuda"))


def test_what_differs_is_found() -> None:
    one, other = (Addition("reduce", "f32", 64, layout) for layout in ("narrow", "wide"))
    assert not differing([{one}, {one}, set()])
    assert differing([{one}, {other}])
    assert differing([{one}, {one, other}])
