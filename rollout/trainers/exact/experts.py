"""Forwards of transformers' routers and experts by the engine's ops.

Legend: T rows, X experts per row, N experts, E hidden, F ffn of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from rollout.models.experts_config import ExpertsSpec
from rollout.models.layers.linear import Linear
from rollout.ops.combine_experts import combine_experts
from rollout.ops.glu import silu_mul
from rollout.ops.group_rows import group_rows
from rollout.ops.routing import route
from rollout.trainers.exact.functions import exactly
from rollout.trainers.exact.products import ExactGrouped, ExactLinear


class ExactRouter:
    """The forward of a router: logits [T, N], and of the chosen experts weights, float32 [T, X],
    and numbers, int64 [T, X]."""

    def __init__(
        self,
        module: Any,
        spec: ExpertsSpec,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self._spec = spec
        self.product = ExactLinear(module, hidden, spec.num_experts, dtype)

    def __call__(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self._spec
        logits_TN = self.product(hidden_states.flatten(0, -2))

        def chosen(logits_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return route(logits_TN, spec.experts_per_token, spec.normalizes, spec.groups)

        with torch.no_grad():
            experts_TX = chosen(logits_TN)[0].long()

        def plain(logits_TN: torch.Tensor) -> torch.Tensor:
            wide = torch.promote_types(logits_TN.dtype, torch.float32)
            weights_TX = logits_TN.to(wide).softmax(-1).gather(-1, experts_TX)
            return weights_TX / weights_TX.sum(-1, keepdim=True) if spec.normalizes else weights_TX

        weights_TX = exactly(lambda logits_TN: chosen(logits_TN)[1], plain, logits_TN)
        return logits_TN, weights_TX, experts_TX


class ExactExperts:
    """The forward of all experts of a layer."""

    def __init__(self, module: Any, spec: ExpertsSpec, router: ExactRouter) -> None:
        """``router``: of the layer; its product's dtype and tiles are those of the experts."""
        like = router.product.linear
        hidden, ffn = like.in_features, spec.ffn_size
        self._module = module
        self._num_experts = spec.num_experts
        self._like = like
        shapes = (spec.num_experts, 2 * ffn, hidden), (spec.num_experts, hidden, ffn)
        self._gate_up, self._down = (
            ExactGrouped(shape, like.dtype, like.device) for shape in shapes
        )

    def linears(self) -> list[Linear]:
        """On a CPU, a product for each expert and weight."""
        return [*self._gate_up.linears(), *self._down.linears()]

    def __call__(
        self, hidden_TE: torch.Tensor, experts_TX: torch.Tensor, weights_TX: torch.Tensor
    ) -> torch.Tensor:
        module = self._module

        def op(
            hidden_TE: torch.Tensor,
            gate_up_N2FE: torch.Tensor,
            down_NEF: torch.Tensor,
            weights_TX: torch.Tensor,
        ) -> torch.Tensor:
            groups = group_rows(experts_TX.int(), self._num_experts)
            gate_up_S2F = self._gate_up.multiply(hidden_TE, gate_up_N2FE, groups, self._like)
            inner_SF = silu_mul(gate_up_S2F)
            outputs_SE = self._down.multiply(inner_SF, down_NEF, groups, self._like)
            return combine_experts(outputs_SE.view(*experts_TX.shape, -1), weights_TX)

        def plain(
            hidden_TE: torch.Tensor,
            gate_up_N2FE: torch.Tensor,
            down_NEF: torch.Tensor,
            weights_TX: torch.Tensor,
        ) -> torch.Tensor:
            total_TE = torch.zeros_like(hidden_TE, dtype=weights_TX.dtype)
            for expert in experts_TX.unique().tolist():
                rows, ranks = (experts_TX == expert).nonzero(as_tuple=True)
                gate, up = (hidden_TE[rows] @ gate_up_N2FE[expert].t()).chunk(2, dim=-1)
                outputs = (silu(gate) * up) @ down_NEF[expert].t()
                total_TE = total_TE.index_add(0, rows, outputs * weights_TX[rows, ranks, None])
            return total_TE

        return exactly(op, plain, hidden_TE, module.gate_up_proj, module.down_proj, weights_TX)
