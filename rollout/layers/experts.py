"""Experts: the sparse half of a decoder layer, where a router picks a few MLPs for each row.

Sources: Shazeer et al. 2017 (Outrageously Large Neural Networks), Qwen2-MoE (Yang et al. 2024; the
shared expert and its gate), Qwen3-MoE (Yang et al. 2025).

Legend: T query rows, E hidden, F ffn of one expert, N experts, X experts per row, S = T * X pairs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rollout.layers.destination import Destination
from rollout.layers.grouped_linear import GroupedLinear
from rollout.layers.linear import Linear
from rollout.ops.combine_experts import combine_experts
from rollout.ops.grouped_matmul import RowGroups
from rollout.ops.routing import route
from rollout.ops.silu_mul import silu_mul


class RouteRecorder(Protocol):
    """Keeps which experts each row of a step went to."""

    def record(self, layer: int, experts_TX: torch.Tensor) -> None:
        """``layer`` counts the sparse layers from 0; int [T, X], the most probable expert first."""
        ...


class Experts:
    """Gate and up of an expert are one product, and so are the router and the shared gate.

    What a row gets depends on that row alone: its choice, its experts' products, and their sum, in
    the order of its choice.
    """

    def __init__(
        self,
        index: int,
        *,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        ffn_size: int,
        shared_ffn_size: int = 0,
        normalizes: bool = True,
        dtype: torch.dtype,
        device: torch.device,
        packing: bool = True,
        stacked: bool | None = None,
    ) -> None:
        """
        Args:
            index: among the sparse layers.
            shared_ffn_size: of an expert that every row passes, with a gate of its own; 0: none.
            normalizes: whether the chosen experts' probabilities are scaled to add up to 1.
            stacked: see GroupedLinear.
        """

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, dtype=dtype, device=device, packing=packing)

        def grouped(inputs: int, outputs: int) -> GroupedLinear:
            return GroupedLinear(
                num_experts, inputs, outputs,
                dtype=dtype, device=device, packing=packing, stacked=stacked,
            )  # fmt: skip

        self.index = index
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.normalizes = normalizes
        self.has_shared = shared_ffn_size > 0
        self.router = linear(hidden_size, num_experts + self.has_shared)
        self.gate_up = grouped(hidden_size, 2 * ffn_size)
        self.down = grouped(ffn_size, hidden_size)
        self._shared: list[Linear] = []
        if self.has_shared:
            shared_gate_up = linear(hidden_size, 2 * shared_ffn_size)
            self._shared = [shared_gate_up, linear(shared_ffn_size, hidden_size)]

    def __call__(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        """[T, E], to be added to the residual. The input is normed already; T may be zero."""
        logits_TN1 = self.router(hidden_TE)
        logits_TN = logits_TN1[:, : self.num_experts]
        experts_TX, weights_TX = route(logits_TN, self.experts_per_token, self.normalizes)
        if routes is not None:
            routes.record(self.index, experts_TX)
        groups = RowGroups.of(experts_TX, self.num_experts)
        outputs_SE = self.down(silu_mul(self.gate_up(hidden_TE, groups)), groups)
        outputs_TXE = outputs_SE.view(*experts_TX.shape, hidden_TE.shape[1])
        if not self.has_shared:
            return combine_experts(outputs_TXE, weights_TX)
        shared_gate_up, shared_down = self._shared
        shared_TE = shared_down(silu_mul(shared_gate_up(hidden_TE)))
        return combine_experts(outputs_TXE, weights_TX, shared_TE, logits_TN1[:, self.num_experts])

    def linears(self) -> list[Linear]:
        """Every matrix product that is one of its own: on a GPU not those of the experts."""
        return [self.router, *self._shared, *self.gate_up.linears(), *self.down.linears()]

    def plain_weights(self) -> list[torch.Tensor]:
        """Those that are no product's of ``linears``."""
        return [*self.gate_up.plain_weights(), *self.down.plain_weights()]

    def destinations(self, at: str) -> dict[str, Destination]:
        """``at``: the prefix of its names in checkpoints, as model.layers.0.mlp.

        Experts are named one by one, and a second time fused, as transformers holds them in memory
        and Qwen3.5-MoE is published: gate_up_proj [N, 2 F, E], down_proj [N, E, F].
        """
        count, ffn, hidden = self.num_experts, self.down.in_features, self.down.out_features
        found = {f"{at}.gate.weight": self.router.weight_rows(0, count)}
        gates, ups, downs = (
            [f"{at}.experts.{expert}.{name}.weight" for expert in range(count)]
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        for expert in range(count):
            found[gates[expert]] = self.gate_up.weight_rows(expert, 0, ffn)
            found[ups[expert]] = self.gate_up.weight_rows(expert, ffn, 2 * ffn)
            found[downs[expert]] = self.down.weight_rows(expert, 0, hidden)
        found[f"{at}.experts.gate_up_proj"] = self.gate_up.all_weights((*gates, *ups))
        found[f"{at}.experts.down_proj"] = self.down.all_weights(tuple(downs))
        if self.has_shared:
            shared_gate_up, shared_down = self._shared
            shared, width = f"{at}.shared_expert", shared_down.in_features
            found[f"{shared}_gate.weight"] = self.router.weight_rows(count, count + 1)
            found[f"{shared}.gate_proj.weight"] = shared_gate_up.weight_rows(0, width)
            found[f"{shared}.up_proj.weight"] = shared_gate_up.weight_rows(width, 2 * width)
            found[f"{shared}.down_proj.weight"] = shared_down.weight_rows(0, hidden)
        return found
