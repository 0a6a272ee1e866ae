"""The likeliest tokens of a row. R rows, V vocabulary, K tokens."""

from __future__ import annotations

import torch


def likeliest(logits_RV: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [R, K], the likeliest first and of equal ones the lowest; fewer where V is less.

    `torch.topk` alone orders equals, of which 16-bit logits have many, as suits how many rows and
    tokens it is asked about: a row would depend on its company.
    """
    vocab = logits_RV.shape[1]
    bits_RV = logits_RV.float().contiguous().view(torch.int32)
    # Floats are ordered as integers are when the negative ones are flipped.
    keys_RV = (bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF)).long()
    keys_RV <<= 32
    keys_RV += torch.arange(vocab - 1, -1, -1, device=logits_RV.device)
    return keys_RV.topk(min(count, vocab), dim=1).indices
