"""Attention over latents against its reference, and the promise that a row's bits depend on its own
keys alone. Pools are NaN wherever no key of the plan is."""

from __future__ import annotations

import os
import random

import pytest
import torch

from rollout.ops.latent_attention import latent_attention, reference
from tests.helpers.attention_cases import (
    Case,
    Entry,
    Request,
    assert_bitwise,
    batch,
    case_on,
    decode_one_by_one,
    random_tree,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ENTRIES = [Entry(0, 1), Entry(64, 1), Entry(70, 5), Entry(55, 9, [0, 0, 2, 3])]


def case_of(device, entries, heads: int, rotary_dim: int, latent_dim: int, dtype, seed=0) -> Case:
    def op(q, k_pool, v_pool, plan, scale):
        return latent_attention(q, k_pool, plan, scale, rotary_dim)

    shape = (heads, 1, rotary_dim + latent_dim)
    return case_on(device, entries, *shape, dtype, seed, op=op)


@pytest.mark.parametrize(
    ("heads", "rotary_dim", "latent_dim"), [(6, 4, 7), (35, 16, 40), (20, 64, 512)]
)
def test_it_is_the_reference(dtype, device, is_gpu, heads, rotary_dim, latent_dim) -> None:
    """A long context is cut among programs of a GPU."""
    if INTERPRETED and latent_dim > 500:
        pytest.skip("the interpreter is slow")
    entries = [*ENTRIES, Entry(1100, 3)] if heads == 6 else ENTRIES
    case = case_of(device, entries, heads, rotary_dim, latent_dim, dtype)
    q, plan = batch(case.requests, padding=2)
    scale = q.shape[-1] ** -0.5
    out = case.op(q, case.k_pool, case.v_pool, plan, scale)
    expected = reference.latent_attention(q, case.k_pool, plan, scale, rotary_dim)
    assert out.shape == (*q.shape[:2], latent_dim)
    assert not out[-2:].any()
    eps = 0 if dtype is torch.float32 else torch.finfo(dtype).eps
    rtol, atol = eps, 5e-6 + eps / 8
    if is_gpu:  # probabilities are rounded to the values' dtype
        rtol = atol = max(1e-5, 4 * eps)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def test_rows_do_not_depend_on_the_batch(compared_dtype, device, set_threads) -> None:
    case = case_of(device, [*ENTRIES, Entry(520, 2)], 9, 8, 24, compared_dtype)
    set_threads(2)
    together = case.run(padding=3)
    set_threads(1)
    for request, out in zip(case.requests, together, strict=True):
        assert_bitwise(case.run([request])[0], out)


def test_prefill_is_chunked_prefill_is_decode(compared_dtype, device) -> None:
    case = case_of(device, [Entry(61, 9)], 3, 8, 24, compared_dtype)
    request = case.requests[0]
    whole = case.run()[0]
    assert_bitwise(decode_one_by_one(case, request.q, request.slots, 61), whole)
    chunks = [
        Request(Entry(61, 4), request.q[:4], request.slots[:65], []),
        Request(Entry(65, 5), request.q[4:], request.slots, []),
    ]
    assert_bitwise(torch.cat(case.run(chunks)), whole)


@pytest.mark.parametrize(("start", "run_len", "nodes"), [(63, 1, 12), (505, 3, 9)])
def test_a_path_of_a_tree_is_plain_decoding(compared_dtype, device, start, run_len, nodes) -> None:
    entry = Entry(start, run_len, random_tree(random.Random(0), nodes))
    case = case_of(device, [entry], 5, 4, 12, compared_dtype)
    request = case.requests[0]
    tree = case.run()[0]
    path = [node for node in range(1, nodes + 1) if entry.mask(nodes) >> node & 1]
    rows = [run_len - 1, *(run_len - 1 + node for node in path)]
    slots = request.slots + [request.node_slots[node - 1] for node in path]
    expected = decode_one_by_one(case, request.q[rows], slots, start + run_len - 1)
    assert_bitwise(expected, tree[rows])
