"""Cross entropy between a head's distribution and given ones, without the logits in memory.

Rows by vocabulary is by far the largest tensor of training, and nothing but its gradient is wanted.
So logits are made, compared and turned into gradients a few rows at a time.

Legend: S rows, E hidden, D draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

_ROWS_AT_ONCE = 128


class SoftCrossEntropy(torch.autograd.Function):
    """``apply(hidden_SE, head_DE, labels_SD, weights_S, dtype)`` gives two values.

    The sum over rows of weight * cross entropy in nats, and (without a gradient) the sum of the
    weights of those rows whose likeliest token is the label's. ``labels_SD``: probabilities.
    ``dtype``: of the matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SE: torch.Tensor,
        head_DE: torch.Tensor,
        labels_SD: torch.Tensor,
        weights_S: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states_SE, table_DE = hidden_SE.to(dtype), head_DE.to(dtype)
        hidden_grad_SE = torch.empty_like(hidden_SE)
        head_grad_DE = torch.zeros_like(head_DE)
        total = hidden_SE.new_zeros((), dtype=torch.float32)
        agreed = hidden_SE.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden_SE), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            logits_RD = (states_SE[rows] @ table_DE.T).float()
            labels_RD, weights_R = labels_SD[rows].float(), weights_S[rows]
            agreed += weights_R[logits_RD.argmax(1) == labels_RD.argmax(1)].sum()
            lse_R1 = logits_RD.logsumexp(1, keepdim=True)
            each_R = lse_R1[:, 0] - (labels_RD * logits_RD).sum(1)
            total += (each_R * weights_R).sum()
            grad_RD = logits_RD.sub_(lse_R1).exp_().sub_(labels_RD).mul_(weights_R[:, None])
            grad_RD = grad_RD.to(dtype)
            hidden_grad_SE[rows] = grad_RD @ table_DE
            head_grad_DE += grad_RD.T @ states_SE[rows]
        ctx.save_for_backward(hidden_grad_SE, head_grad_DE)
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad_SE, head_grad_DE = ctx.saved_tensors
        return hidden_grad_SE * grads[0], head_grad_DE * grads[0], None, None, None
