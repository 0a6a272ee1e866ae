"""One decoder layer: its weights, and its two halves, the mixer and the MLP.

The model adds to the residual, and applies the norm of what either half reads.

Legend: T query rows, I attention inputs, E hidden, P positions, D rotary dims.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from rollout.models.attention import Attention
from rollout.models.forward_context import LayerStates, StepAttention
from rollout.models.gated_delta_net import GatedDeltaNet
from rollout.models.latent_attention import LatentAttention
from rollout.models.layers.experts import Experts, RouteRecorder
from rollout.models.layers.linear import Linear
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.layers.weight_loader import WeightLoader
from rollout.models.mlp import FeedForward, feed_forward
from rollout.models.own_weights import LayerHalf
from rollout.models.spec import ModelSpec


class Layer(ABC):
    """A mixer and an MLP, each with a norm.

    The mixer is the half in which rows see each other: attention or a recurrence.
    """

    experts_class: ClassVar[type[Experts]] = Experts

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightFactory,
        mixer: LayerHalf,
        mixer_name: str,
        *,
        index: int,
        layer: int,
    ) -> None:
        """
        Args:
            mixer_name: the mixer's name in checkpoints.
            index: among the model's layers with this kind of mixer.
            layer: among all layers.
        """
        self.spec = spec
        self.index = index
        self._mixer = mixer
        self._mixer_name = mixer_name
        self.input_norm_E = weights.tensor(spec.hidden_size)
        self.mlp_norm_E = weights.tensor(spec.hidden_size)
        self.mlp: FeedForward = feed_forward(spec, weights, layer, self.experts_class)

    @property
    def norms_before(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The norms of the mixer's and of the MLP's input; None: they read the residual itself."""
        return self.input_norm_E, self.mlp_norm_E

    @abstractmethod
    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        """The mixer's output [T, E], from each row and those before it, to add to the residual."""
        ...

    def feed_forward(
        self, hidden_TE: torch.Tensor, routes: RouteRecorder | None = None
    ) -> torch.Tensor:
        """The MLP's output [T, E], from each row alone, to add to the residual."""
        return self.mlp(hidden_TE, routes)

    def linears(self) -> list[Linear]:
        """The layer's matrix products."""
        return [*self._mixer.linears(), *self.mlp.linears()]

    def plain_weights(self) -> list[torch.Tensor]:
        """Parameters that do not belong to a linear layer."""
        halves = [*self._mixer.plain_weights(), *self.mlp.plain_weights()]
        return [*self._norms().values(), *halves]

    def weight_loaders(self, at: str) -> dict[str, WeightLoader]:
        """Loaders by checkpoint name. ``at``: their prefix, such as model.layers.0."""
        norms = self._norms().items()
        found = {f"{at}.{name}.weight": WeightLoader.of(norm) for name, norm in norms}
        found |= self._mixer.weight_loaders(f"{at}.{self._mixer_name}")
        return found | self.mlp.weight_loaders(f"{at}.mlp")

    def _norms(self) -> dict[str, torch.Tensor]:
        return {
            "input_layernorm": self.input_norm_E,
            "post_attention_layernorm": self.mlp_norm_E,
        }


class DecoderLayer(Layer):
    """A layer whose mixer is attention."""

    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightFactory,
        *,
        index: int = 0,
        layer: int = 0,
        attention_inputs: int | None = None,
    ) -> None:
        """
        Args:
            index: among the attention layers.
            layer: among all layers.
            attention_inputs: I; default: the hidden size.
        """
        kind = self.attention_class if spec.latent is None else LatentAttention
        self._attention: Attention | LatentAttention = kind(
            spec, weights, layer=layer, inputs=attention_inputs
        )
        super().__init__(spec, weights, self._attention, "self_attn", index=index, layer=layer)

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        return self.attend(hidden_TE, positions_T, cos_sin_PD, attention)

    def attend(
        self,
        hidden_TI: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        rows_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention's output [T, E], to add to the residual. ``rows_R``: of these rows alone,
        [R, E]."""
        return self._attention(self.index, hidden_TI, positions_T, cos_sin_PD, attention, rows_R)


class DeltaLayer(Layer):
    """A recurrent layer, by the gated delta rule."""

    def __init__(self, spec: ModelSpec, weights: WeightFactory, *, index: int, layer: int) -> None:
        """``index``: among the recurrent layers. ``layer``: among all layers."""
        self._delta_net = GatedDeltaNet(spec, weights)
        super().__init__(spec, weights, self._delta_net, "linear_attn", index=index, layer=layer)

    def mix(
        self,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        attention: StepAttention,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        assert states is not None
        return self._delta_net(self.index, hidden_TE, states)
