"""Top-k, top-p and min-p on a GPU, without a sort: one program per row.

Both cuts are the largest t for which the tokens with a logit of at least t have enough: k of them,
or the share p of the weight that top-k leaves. Floats are ordered as integers are when the negative
ones are flipped, so t is found digit by digit, four bits to a pass over the row. Every pass adds
the same weights in the same places, so what one finds the next one finds again.

Weights are float32, added in float32 per lane and in float64 across lanes: less than 1e-6 of the
row's sum off the reference's, so a token is kept here and not there only where the cumulative
probability meets p within that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def truncation_threshold(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    rows, vocab = logits_RV.shape
    threshold_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    if rows:
        _threshold_kernel[(rows,)](
            logits_RV, temperature_R.contiguous(), top_k_R.contiguous(), top_p_R.contiguous(),
            min_p_R.contiguous(), threshold_R, logits_RV.stride(0), vocab,
            BLOCK=_BLOCK, num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
    return threshold_R


@triton.jit
def _key(logit):
    """An integer in [0, 2**32) ordered as the float32 is."""
    bits = logit.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _logit(key):
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _measures(logits_ptr, vocab, top, scale, keys, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens, or how much weight, are at each of 16 keys or above; float64."""
    at_least = tl.zeros((16, BLOCK), tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
        weight = tl.where(token < vocab, 1.0, 0.0)
        if BY_WEIGHT:
            weight = tl.exp(tl.math.div_rn(logit - top, scale))
        reached = _key(logit)[None, :] >= keys[:, None]
        at_least += tl.where(reached, weight[None, :], 0.0)
    return tl.sum(at_least.to(tl.float64), axis=1)


@triton.jit
def _search(logits_ptr, vocab, top, scale, enough, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key with a measure of ``enough``."""
    digit = tl.arange(0, 16).to(tl.int64)
    found = tl.zeros((), tl.int64)
    for place in range(0, 8):
        step = tl.full((), 1, tl.int64) << (28 - 4 * place)
        measures = _measures(logits_ptr, vocab, top, scale, found + digit * step, BY_WEIGHT, BLOCK)
        found += (tl.maximum(tl.sum((measures >= enough).to(tl.int32)), 1) - 1) * step
    return found


@triton.jit
def _threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    temperature = tl.load(temperature_ptr + row)
    scale = tl.where(temperature == 0, 1.0, temperature)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
        tops = tl.maximum(tops, logit)
    top = tl.max(tops, axis=0)

    key = tl.zeros((), tl.int64)  # below every logit
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab):
        key = _search(logits_ptr, vocab, top, scale, top_k.to(tl.float64), False, BLOCK)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1:
        keys = key + tl.zeros((16,), tl.int64)
        left = tl.max(_measures(logits_ptr, vocab, top, scale, keys, True, BLOCK))
        by_weight = _search(logits_ptr, vocab, top, scale, left * top_p.to(tl.float64), True, BLOCK)
        key = tl.maximum(key, by_weight)
    threshold = tl.where(key == 0, float("-inf"), _logit(key))
    floor = top + tl.log(tl.load(min_p_ptr + row).to(tl.float64)).to(tl.float32) * scale
    # Not above the top: a share of nothing, or a row of NaN, would cut all there is.
    tl.store(out_ptr + row, tl.minimum(tl.maximum(threshold, floor), top))
