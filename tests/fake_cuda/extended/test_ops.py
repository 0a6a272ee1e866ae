"""Ops on a GPU: grids fit at the largest sizes that are meant to run, and rows of logits are added
up in one order, whatever their dtype and whatever else is asked for."""

from __future__ import annotations

import sys

import pytest
import torch

from rollout.ops.categorical import categorical, entropy, token_logprobs
from rollout.ops.gated_delta_rule.chunked import torch_kernel
from rollout.ops.gated_delta_rule.fla import chunked_kernel
from rollout.ops.matmul import matmul
from rollout.ops.paged_attention import AttentionPlan, paged_attention
from rollout.ops.rotary_store_kv import rotary_store_kv_
from rollout.ops.tree_accept import accept
from rollout.ops.truncation import truncation_threshold
from rollout.ops.uniforms import uniforms
from tests.helpers.additions import differing_sums
from tests.helpers.fake_cuda import FakeGpu

ROWS, VOCAB = 16_384, 151_936  # more than 2**31 logits
SLOTS, KV_HEADS, DIM = 4_000_000, 8, 128  # more than 2**31 numbers
CONTEXT = 131_072


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def fits(gpu: FakeGpu) -> None:
    assert gpu.launches.all
    assert not [problem for launch in gpu.launches.all for problem in launch.problems]


@pytest.mark.parametrize(("entries", "run_len", "nodes"), [(256, 1, 15), (1, 8192, 0), (1, 1, 63)])
def test_attention_over_long_contexts(gpu: FakeGpu, entries, run_len, nodes) -> None:
    ints = {"dtype": torch.int32}
    plan = AttentionPlan(
        req_to_token=on_gpu(257, CONTEXT, **ints),
        rows_B=on_gpu(entries, **ints),
        q_offsets_B1=on_gpu(entries + 1, **ints),
        starts_B=on_gpu(entries, **ints),
        run_lens_B=on_gpu(entries, **ints),
        node_offsets_B1=on_gpu(entries + 1, **ints),
        node_masks_N=on_gpu(entries * nodes, dtype=torch.int64),
        node_slots_N=on_gpu(entries * nodes, **ints),
    )
    q_THD = on_gpu(entries * (run_len + nodes), 32, DIM)
    pools = on_gpu(2, SLOTS, KV_HEADS, DIM)
    paged_attention(q_THD, pools[0], pools[1], plan, DIM**-0.5)
    kv = on_gpu(2, len(q_THD), KV_HEADS, DIM)
    places_T = on_gpu(len(q_THD), dtype=torch.int64)
    table = on_gpu(CONTEXT, DIM, dtype=torch.float32)
    rotary_store_kv_(q_THD, *kv, places_T, table, *pools, places_T)
    fits(gpu)


def test_logits_of_many_rows(gpu: FakeGpu) -> None:
    logits_RV = on_gpu(ROWS, VOCAB)
    numbers_R = on_gpu(ROWS, dtype=torch.float32)
    tokens_R = on_gpu(ROWS, dtype=torch.int64)
    threshold_R = truncation_threshold(logits_RV, numbers_R, tokens_R, numbers_R, numbers_R)
    categorical(logits_RV, numbers_R, uniforms(tokens_R, tokens_R), threshold_R)
    token_logprobs(logits_RV, numbers_R, on_gpu(ROWS, 20, dtype=torch.int64))
    entropy(logits_RV, numbers_R)
    ints = {"dtype": torch.int32}
    nodes = ROWS - 256
    accept(
        tokens_R, on_gpu(257, **ints), on_gpu(nodes, **ints), on_gpu(nodes, **ints),
        on_gpu(nodes, dtype=torch.int64), on_gpu(257, **ints),
    )  # fmt: skip
    fits(gpu)


def test_products_of_many_rows(gpu: FakeGpu) -> None:
    matmul(on_gpu(ROWS, 4096), on_gpu(VOCAB, 4096))
    fits(gpu)


@pytest.mark.parametrize("vocab", [128_256, 32_003, 97])
def test_logits_of_any_dtype_are_added_up_alike(gpu: FakeGpu, vocab) -> None:
    """How a sum is shared out among threads goes by what is loaded, and a penalty makes logits
    float32. The interpreter adds in an order of its own."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits_RV = on_gpu(4, vocab, dtype=dtype)
        ones_R = on_gpu(4, dtype=torch.float32)
        k_R = on_gpu(4, dtype=torch.int64)
        for threshold_R in (None, truncation_threshold(logits_RV, ones_R, k_R, ones_R, ones_R)):
            tokens_R, _ = categorical(logits_RV, ones_R, ones_R.double(), threshold_R)
        token_logprobs(logits_RV, ones_R, tokens_R)
        entropy(logits_RV, ones_R)
    launches = gpu.launches.distinct()
    assert {"_sums_kernel", "_draw_kernel", "_entropy_kernel"} <= {each.name for each in launches}
    assert not differing_sums(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_package_ours_is_taken(gpu: FakeGpu, monkeypatch, dtype) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert chunked_kernel(on_gpu(1, 4, 24, 40, dtype=torch.float32), dtype) is torch_kernel
