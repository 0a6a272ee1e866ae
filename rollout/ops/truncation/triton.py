"""Top-k, top-p and min-p on a GPU without a sort, by four kernels that split a row.

Both cuts are the largest t for which the tokens with a logit of at least t suffice: k tokens, or
the share p of the weight that top-k leaves. Counts and weights by bin tell in which of 32 bins of
logits such a t lies, and only tokens of those bins are searched for t itself:

1. The top of each block of 4096 tokens. 2. Counts and weights of each block in each bin. A bin is a
range of distances from the row's top, narrow near the top. 3. The tokens of the relevant bins, in
the order of the vocabulary. 4. A program per row finds t digit by digit, four bits per pass over
those tokens: float32 numbers are ordered like integers once the negative ones are flipped. With
more than _MAX_FOUND tokens it passes over the row instead.

The order of sums depends on the row alone. Weights are float32, added in float32 within blocks and
lanes and in float64 across, less than 1e-6 of the row's sum off the reference. So this op and the
reference disagree on a token only where the cumulative probability meets p within that error.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops.categorical.triton import block_logits, scale_of, top_of_row, tops_kernel
from rollout.ops.gpu import check_row_alignment

_BLOCK = 4096
_BINS = 32
_MAX_FOUND = 16384  # tokens of a row that are stored for the search
_SEARCHED = 1024  # tokens read at a time


def truncation_threshold(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    rows, vocab = logits_RV.shape
    blocks = triton.cdiv(vocab, _BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits_RV.device)

    check_row_alignment(logits_RV)

    threshold_R = empty(rows)
    if not rows:
        return threshold_R
    tops_RB, found_RM = empty(rows, blocks), empty(rows, _MAX_FOUND, dtype=logits_RV.dtype)
    counts_RBJ = empty(rows, blocks, _BINS, dtype=torch.int32)
    weights_RBJ = empty(rows, blocks, _BINS)
    row = (logits_RV, logits_RV.stride(0), vocab, blocks)
    cuts = (temperature_R.contiguous(), top_k_R.contiguous(), top_p_R.contiguous())
    bins = (tops_RB, counts_RBJ, weights_RBJ)
    shape = {"BLOCKS": triton.next_power_of_2(blocks), "BINS": _BINS}
    tops_kernel[(rows, blocks)](
        logits_RV, tops_RB, *row[1:], BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
    )
    _bins_kernel[(rows, blocks)](
        *row, cuts[0], *bins, **shape, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
    )
    _gather_kernel[(rows, blocks)](
        *row, *cuts, *bins, found_RM,
        **shape, BLOCK=_BLOCK, MAX_FOUND=_MAX_FOUND, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    _threshold_kernel[(rows,)](
        *row, *cuts, min_p_R.contiguous(), *bins, found_RM, threshold_R,
        **shape, BLOCK=_SEARCHED, MAX_FOUND=_MAX_FOUND, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return threshold_R


@triton.jit
def _key(logit):
    """An integer in [0, 2**32) with the order of the float32."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _logit(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(logit, there, top, scale):
    return tl.where(there, tl.exp(tl.math.div_rn(logit - top, scale)), 0.0)


@triton.jit
def _bin(logit, top, BINS: tl.constexpr):
    """The bin of a logit, larger for smaller logits; the last bin for distant ones and for NaN."""
    distance = 4.0 * tl.sqrt_rn(top - logit)
    return tl.where(distance < BINS - 1, distance, BINS - 1).to(tl.int32)


@triton.jit
def _through(
    values_ptr, row, blocks, DTYPE: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr
):
    """[BINS] cumulative sums over bins, of all blocks."""
    block, bin = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BINS)[None, :]
    ptrs = values_ptr + (row * blocks + block) * BINS + bin
    values = tl.load(ptrs, mask=block < blocks, other=0)
    return tl.cumsum(tl.sum(values.to(DTYPE), axis=0), axis=0)


@triton.jit
def _before(through, bin, BINS: tl.constexpr):
    """The sum of the bins before ``bin``."""
    return tl.sum(tl.where(tl.arange(0, BINS) == bin - 1, through, 0), axis=0)


@triton.jit
def _first_with(through, enough, BINS: tl.constexpr):
    """The first bin whose cumulative sum is at least ``enough``; else the last."""
    return tl.minimum(tl.sum((through < enough).to(tl.int32), axis=0), BINS - 1)


@triton.jit
def _wanted_bins(
    row, vocab, blocks, top_k_ptr, top_p_ptr, counts_ptr, weights_ptr,
    BLOCKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """First and last bin that may hold a cut, tokens and weight before the first, total weight.

    If nothing is cut, the first bin is after the last.
    """
    counts = _through(counts_ptr, row, blocks, tl.int32, BLOCKS, BINS)
    weights = _through(weights_ptr, row, blocks, tl.float64, BLOCKS, BINS)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    first, last = 1, 0
    total = _before(weights, BINS, BINS)
    min_left = total
    by_k = (top_k > 0) & (top_k < vocab)
    if by_k:
        last = _first_with(counts, top_k, BINS)
        first = last
        min_left = _before(weights, last, BINS)
    if top_p < 1:
        share = top_p.to(tl.float64)
        first = _first_with(weights, share * min_left, BINS)
        if not by_k:
            last = first
    return first, last, _before(counts, first, BINS), _before(weights, first, BINS), total


@triton.jit
def _bins_kernel(
    logits_ptr, stride, vocab, blocks, temperature_ptr, tops_ptr, counts_ptr, weights_ptr,
    BLOCKS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = top_of_row(tops_ptr, row, blocks, BLOCKS)
    token, logit = block_logits(logits_ptr + row * stride, block * BLOCK, vocab, BLOCK)
    there = token < vocab
    bin = _bin(logit, top, BINS)
    weight = _weight(logit, there, top, scale_of(temperature_ptr, row))
    start = (row * blocks + block) * BINS
    tl.store(counts_ptr + start + tl.arange(0, BINS), tl.histogram(bin, BINS, mask=there))
    for j in range(BINS):
        tl.store(weights_ptr + start + j, tl.sum(tl.where(bin == j, weight, 0.0), axis=0))


@triton.jit
def _gather_kernel(
    logits_ptr, stride, vocab, blocks, temperature_ptr, top_k_ptr, top_p_ptr,
    tops_ptr, counts_ptr, weights_ptr, found_ptr,
    BLOCKS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, MAX_FOUND: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, last, _, _, _ = _wanted_bins(
        row, vocab, blocks, top_k_ptr, top_p_ptr, counts_ptr, weights_ptr, BLOCKS, BINS
    )
    earlier, bins = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BINS)[None, :]
    count_ptrs = counts_ptr + (row * blocks + earlier) * BINS + bins
    wanted = (earlier < block) & (bins >= first) & (bins <= last)
    index = tl.sum(tl.sum(tl.load(count_ptrs, mask=wanted, other=0), axis=1), axis=0)

    top = top_of_row(tops_ptr, row, blocks, BLOCKS)
    token, logit = block_logits(logits_ptr + row * stride, block * BLOCK, vocab, BLOCK)
    there = token < vocab
    bin = _bin(logit, top, BINS)
    here = there & (bin >= first) & (bin <= last)
    index += tl.cumsum(here.to(tl.int32), axis=0) - 1
    tl.store(found_ptr + row * MAX_FOUND + index, logit, mask=here & (index < MAX_FOUND))


@triton.jit
def _measures(
    logits_ptr, end, top, scale, first, last, keys,
    BY_WEIGHT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The number or weight of the bins' tokens at or above each of 16 keys; float64."""
    at_least = tl.zeros((16, BLOCK), tl.float32)
    for start in range(0, end, BLOCK):
        token, logit = block_logits(logits_ptr, start, end, BLOCK)
        bin = _bin(logit, top, BINS)
        there = (token < end) & (bin >= first) & (bin <= last)
        weight = tl.where(there, 1.0, 0.0)
        if BY_WEIGHT:
            weight = _weight(logit, there, top, scale)
        reached = _key(logit)[None, :] >= keys[:, None]
        at_least += tl.where(reached, weight[None, :], 0.0)
    return tl.sum(at_least.to(tl.float64), axis=1)


@triton.jit
def _above(
    logits_ptr, end, top, scale, first, last, key,
    BY_WEIGHT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The number or weight of the bins' tokens above one key."""
    keys = key + 1 + tl.zeros((16,), tl.int64)
    return tl.max(_measures(logits_ptr, end, top, scale, first, last, keys, BY_WEIGHT, BINS, BLOCK))


@triton.jit
def _search(
    logits_ptr, end, top, scale, first, last, enough,
    BY_WEIGHT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key whose number or weight is at least ``enough``."""
    digit = tl.arange(0, 16).to(tl.int64)
    found = tl.zeros((), tl.int64)
    for index in range(0, 8):
        step = tl.full((), 1, tl.int64) << (28 - 4 * index)
        measures = _measures(
            logits_ptr, end, top, scale, first, last, found + digit * step, BY_WEIGHT, BINS, BLOCK
        )
        found += (tl.maximum(tl.sum((measures >= enough).to(tl.int32)), 1) - 1) * step
    return found


@triton.jit
def _threshold_kernel(
    logits_ptr, stride, vocab, blocks, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    tops_ptr, counts_ptr, weights_ptr, found_ptr, out_ptr,
    BLOCKS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, MAX_FOUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top, scale = top_of_row(tops_ptr, row, blocks, BLOCKS), scale_of(temperature_ptr, row)
    first, last, count_before, weight_before, left = _wanted_bins(
        row, vocab, blocks, top_k_ptr, top_p_ptr, counts_ptr, weights_ptr, BLOCKS, BINS
    )
    threshold = tl.full((), float("-inf"), tl.float32)
    if first <= last:
        through = _through(counts_ptr, row, blocks, tl.int32, BLOCKS, BINS)
        end = _before(through, last + 1, BINS) - count_before
        logits_ptr += row * stride
        if end > MAX_FOUND:
            end = vocab
        else:
            logits_ptr = found_ptr + row * MAX_FOUND
        key = tl.zeros((), tl.int64)  # below every logit
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            enough = (top_k - count_before).to(tl.float64)
            key = _search(logits_ptr, end, top, scale, first, last, enough, False, BINS, BLOCK)
            # Of tokens equal to the k-th, only as many count as make k.
            above = _above(logits_ptr, end, top, scale, first, last, key, False, BINS, BLOCK)
            equal = (enough - above) * _weight(_logit(key), True, top, scale).to(tl.float64)
            above = _above(logits_ptr, end, top, scale, first, last, key, True, BINS, BLOCK)
            left = weight_before + above + equal
        if top_p < 1:
            most = _above(logits_ptr, end, top, scale, first, last, key - 1, True, BINS, BLOCK)
            # A sum by bins may round differently; the cut is then the first or last of these.
            enough = left * top_p.to(tl.float64) - weight_before
            enough = tl.maximum(tl.minimum(enough, most), 1e-300)
            by_weight = _search(logits_ptr, end, top, scale, first, last, enough, True, BINS, BLOCK)
            key = tl.maximum(key, by_weight)
        threshold = tl.where(key == 0, float("-inf"), _logit(key))
    floor = top + tl.log(tl.load(min_p_ptr + row).to(tl.float64)).to(tl.float32) * scale
    # At most the top: a share of zero, or a row of NaN, would cut every token.
    tl.store(out_ptr + row, tl.minimum(tl.maximum(threshold, floor), top))
