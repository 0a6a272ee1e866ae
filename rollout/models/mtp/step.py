"""One step of an MTP chain: a decoder layer over a token's embedding and the hidden state before.

Legend: T query rows, R rows whose logits are wanted, E hidden, D draft vocabulary, V the target's
vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rollout.layers.destination import Destination
from rollout.layers.linear import Linear
from rollout.models.causal_lm import CausalLM, LayerAttention
from rollout.models.decoder_layer import allocate_weights, linear_destinations, release_weights
from rollout.models.draft_model import DraftSpec
from rollout.models.llama import LlamaLayer
from rollout.models.mtp.layout import StepNames
from rollout.ops.rms_norm import add_rms_norm, rms_norm


class SharedTensors:
    """Makes each named tensor of a chain once, however many of its steps have it."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, packing: bool) -> None:
        self._options = {"dtype": dtype, "device": device}
        self._packing = packing
        self._tables: dict[str, torch.Tensor] = {}
        self._linears: dict[str, Linear] = {}

    def table(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._tables:
            self._tables[name] = torch.empty(shape, **self._options)
        return self._tables[name]

    def linear(self, name: str, inputs: int, outputs: int) -> Linear:
        if name not in self._linears:
            linear = Linear(inputs, outputs, packing=self._packing, **self._options)
            self._linears[name] = linear
        return self._linears[name]
