"""The product of each head's rows with the head's own weight in plain torch."""

from __future__ import annotations

import torch


def head_matmul(x_THI: torch.Tensor, weights_HIO: torch.Tensor) -> torch.Tensor:
    y_THO = torch.einsum("thi,hio->tho", x_THI.float(), weights_HIO.float())
    return y_THO.to(x_THI.dtype)
