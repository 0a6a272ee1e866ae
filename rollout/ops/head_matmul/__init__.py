"""The product of each head's rows with the head's own weight, on the CPU.

Legend: T rows, H heads, I input, O output features. On a GPU heads are experts: see
`rollout.ops.grouped_matmul`.
"""

from __future__ import annotations

import torch

from rollout.ops.head_matmul import native, reference


def head_matmul(
    x_THI: torch.Tensor, weights_HIO: torch.Tensor, out_THO: torch.Tensor | None = None
) -> torch.Tensor:
    """``y[:, h] = x[:, h] @ weights[h]``, summed in float32 and rounded once: [T, H, O].

    A row's bits depend on that row alone. ``weights_HIO`` is contiguous, ``x_THI`` may be strided.
    ``out_THO``: where the result goes, may be strided; default: a new tensor.
    """
    if out_THO is None:
        out_THO = x_THI.new_empty((*x_THI.shape[:2], weights_HIO.shape[2]))
    if native.supports(x_THI, weights_HIO, out_THO):
        native.head_matmul(x_THI, weights_HIO, out_THO)
    else:
        out_THO.copy_(reference.head_matmul(x_THI, weights_HIO))
    return out_THO
