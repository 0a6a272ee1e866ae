"""Sampling, logprobs and entropy of logits on a GPU.

As on the CPU: weights exp((logit - top) / T) are summed in float32 within fixed blocks of the
vocabulary and in float64 across blocks, so a row's numbers do not depend on the others. Three
kernels share a row's blocks out over the GPU: the block's top, its sum, and the choice.

Against the CPU's own, exponentials differ by some units in the last place, sums by about 1e-7 of
themselves: a draw differs where its uniform number meets the cumulative probability within that.

With 8 warps a thread has four neighbours of a block whatever the dtype of logits; with 4 it would
have eight of a 16-bit one and add them in another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.ops.gpu import check_row_alignment

_BLOCK = 1024
_WARPS = 8


def categorical(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    threshold_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocab = logits_RV.shape
    tokens_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    logprobs_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    if rows:
        temperature_R = temperature_R.float().contiguous()
        tops_RB, sums = _block_sums(logits_RV, temperature_R, threshold_R)
        _draw_kernel[(rows,)](
            logits_RV, temperature_R, uniform_R.double().contiguous(), threshold_R, tops_RB,
            *sums, tokens_R, logprobs_R, logits_RV.stride(0), vocab, tops_RB.shape[1],
            TRUNCATED=threshold_R is not None, **_shape(tops_RB), num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return tokens_R, logprobs_R


def token_logprobs(
    logits_RV: torch.Tensor, temperature_R: torch.Tensor, tokens_R: torch.Tensor
) -> torch.Tensor:
    """``tokens_R``: [R] or [R, K]."""
    rows, vocab = logits_RV.shape
    logprobs_R = torch.empty(tokens_R.shape, dtype=torch.float32, device=logits_RV.device)
    if logprobs_R.numel():
        temperature_R = temperature_R.float().contiguous()
        tops_RB, sums = _block_sums(logits_RV, temperature_R, None)
        _token_logprobs_kernel[(rows, logprobs_R.numel() // rows)](
            logits_RV, temperature_R, tokens_R.long().contiguous(), tops_RB, sums[0],
            logprobs_R,
            logits_RV.stride(0), vocab, tops_RB.shape[1],
            **_shape(tops_RB), num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs_R


def entropy(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    rows = len(logits_RV)
    entropy_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    if rows:
        temperature_R = temperature_R.float().contiguous()
        tops_RB, sums = _block_sums(logits_RV, temperature_R, None, moments=True)
        _entropy_kernel[(rows,)](
            *sums, entropy_R, tops_RB.shape[1], BLOCKS=_shape(tops_RB)["BLOCKS"],
            num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return entropy_R


def _shape(tops_RB: torch.Tensor) -> dict[str, int]:
    return {"BLOCK": _BLOCK, "BLOCKS": triton.next_power_of_2(tops_RB.shape[1])}


def _block_sums(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    threshold_R: torch.Tensor | None,
    *,
    moments: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tops [R, B], and two sums [R, B]: of all weights; of the surviving ones, or weight * log."""
    check_row_alignment(logits_RV)
    rows, vocab = logits_RV.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    tops_RB = torch.empty(rows, blocks, dtype=torch.float32, device=logits_RV.device)
    # Two tensors: the alignment of a shared one's second half would depend on the number of rows.
    sums = [torch.empty_like(tops_RB) for _ in range(2)]
    tops_kernel[(rows, blocks)](
        logits_RV, tops_RB, logits_RV.stride(0), vocab, blocks,
        BLOCK=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    _sums_kernel[(rows, blocks)](
        logits_RV, temperature_R, threshold_R, tops_RB, *sums, logits_RV.stride(0), vocab,
        blocks, TRUNCATED=threshold_R is not None, MOMENTS=moments, **_shape(tops_RB),
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return tops_RB, sums


@triton.jit
def block_logits(logits_ptr, first, vocab, BLOCK: tl.constexpr):
    """Tokens from ``first`` on and their logits as float32, -inf outside the row."""
    token = first + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
    return token, logit.to(tl.float32)


@triton.jit
def scale_of(temperature_ptr, row):
    """The temperature that divides a row's logits."""
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _row_of_blocks(ptr, row, blocks, other, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.load(ptr + row * blocks + block, mask=block < blocks, other=other)


@triton.jit
def top_of_row(tops_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The largest logit of a row, of those that `tops_kernel` found."""
    return tl.max(_row_of_blocks(tops_ptr, row, blocks, float("-inf"), BLOCKS), axis=0)


@triton.jit
def tops_kernel(logits_ptr, tops_ptr, stride, vocab, blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, logit = block_logits(logits_ptr + row * stride, block * BLOCK, vocab, BLOCK)
    tl.store(tops_ptr + row * blocks + block, tl.max(logit, axis=0))


@triton.jit
def _sums_kernel(
    logits_ptr, temperature_ptr, threshold_ptr, tops_ptr, sums_ptr, other_ptr, stride, vocab,
    blocks,
    TRUNCATED: tl.constexpr, MOMENTS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = top_of_row(tops_ptr, row, blocks, BLOCKS)
    token, logit = block_logits(logits_ptr + row * stride, block * BLOCK, vocab, BLOCK)
    shifted = tl.math.div_rn(logit - top, scale_of(temperature_ptr, row))
    weight = tl.where(token < vocab, tl.exp(shifted), 0.0)
    index = row * blocks + block
    tl.store(sums_ptr + index, tl.sum(weight, axis=0))
    if TRUNCATED:
        surviving = tl.where(logit < tl.load(threshold_ptr + row), 0.0, weight)
        tl.store(other_ptr + index, tl.sum(surviving, axis=0))
    if MOMENTS:
        moment = tl.where(weight == 0, 0.0, weight * shifted)  # 0 * -inf is 0 here
        tl.store(other_ptr + index, tl.sum(moment, axis=0))


@triton.jit
def _total(sums_ptr, row, blocks, BLOCKS: tl.constexpr):
    return tl.sum(_row_of_blocks(sums_ptr, row, blocks, 0.0, BLOCKS).to(tl.float64), axis=0)


@triton.jit
def _logprob(logits_ptr, token, vocab, top, scale, total):
    """A token's logprob; NaN for one outside the vocabulary."""
    inside = (token >= 0) & (token < vocab)
    logit = tl.load(logits_ptr + token, mask=inside, other=float("nan")).to(tl.float32)
    shifted = tl.math.div_rn(logit - top, scale)
    return (shifted.to(tl.float64) - tl.log(total)).to(tl.float32)


@triton.jit
def _first_over(weights, before, target, SIZE: tl.constexpr):
    """The first index whose cumulative weight exceeds the target; else the last with any weight."""
    index = tl.arange(0, SIZE)
    over = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0)
    first = tl.min(tl.where(over, index, SIZE), axis=0)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _draw_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, threshold_ptr, tops_ptr, sums_ptr, surviving_ptr,
    tokens_ptr, logprobs_ptr, stride, vocab, blocks,
    TRUNCATED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    scale = scale_of(temperature_ptr, row)
    tops = _row_of_blocks(tops_ptr, row, blocks, float("-inf"), BLOCKS)
    top = tl.max(tops, axis=0)
    total = _total(sums_ptr, row, blocks, BLOCKS)
    block = tl.arange(0, BLOCKS)
    if tl.load(temperature_ptr + row) == 0:
        chosen = tl.min(tl.where(tops == top, block, BLOCKS - 1), axis=0)
        token, logit = block_logits(logits_ptr, chosen * BLOCK, vocab, BLOCK)
        drawn = tl.min(tl.where(logit == top, token, vocab), axis=0)
    else:
        sums = _row_of_blocks(sums_ptr, row, blocks, 0.0, BLOCKS).to(tl.float64)
        if TRUNCATED:
            sums = _row_of_blocks(surviving_ptr, row, blocks, 0.0, BLOCKS).to(tl.float64)
        target = tl.load(uniform_ptr + row) * tl.sum(sums, axis=0)
        chosen = _first_over(sums, 0.0, target, BLOCKS)
        before = tl.sum(tl.where(block < chosen, sums, 0.0), axis=0)
        token, logit = block_logits(logits_ptr, chosen * BLOCK, vocab, BLOCK)
        weight = tl.where(token < vocab, tl.exp(tl.math.div_rn(logit - top, scale)), 0.0)
        if TRUNCATED:
            weight = tl.where(logit < tl.load(threshold_ptr + row), 0.0, weight)
        drawn = chosen * BLOCK + _first_over(weight.to(tl.float64), before, target, BLOCK)
    logprob = _logprob(logits_ptr, drawn, vocab, top, scale, total)
    tl.store(logprobs_ptr + row, logprob)
    tl.store(tokens_ptr + row, tl.where(total != total, -1, drawn).to(tl.int64))


@triton.jit
def _token_logprobs_kernel(
    logits_ptr, temperature_ptr, tokens_ptr, tops_ptr, sums_ptr, logprobs_ptr, stride, vocab,
    blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = row * tl.num_programs(1) + tl.program_id(1)
    top = top_of_row(tops_ptr, row, blocks, BLOCKS)
    total = _total(sums_ptr, row, blocks, BLOCKS)
    scale = scale_of(temperature_ptr, row)
    token = tl.load(tokens_ptr + index)
    logprob = _logprob(logits_ptr + row * stride, token, vocab, top, scale, total)
    tl.store(logprobs_ptr + index, logprob)


@triton.jit
def _entropy_kernel(sums_ptr, moments_ptr, entropy_ptr, blocks, BLOCKS: tl.constexpr):
    """log(total) - sum(weight * log weight) / total, with weights relative to the top token's."""
    row = tl.program_id(0).to(tl.int64)
    total = _total(sums_ptr, row, blocks, BLOCKS)
    moment = _total(moments_ptr, row, blocks, BLOCKS)
    tl.store(entropy_ptr + row, (tl.log(total) - moment / total).to(tl.float32))
