"""Where a draft's training begins: at what of the target can serve.

Legend: E hidden, D draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from rollout.models.causal_lm import CausalLM
from spec_workers.draft_training.decoder_layer import DecoderLayer
from spec_workers.draft_training.eagle3 import Eagle3

_RESIDUAL_SCALE = 0.1
"""Of what has no counterpart in the target, beside the usual scale: it begins as a small part."""


class TargetTensors:
    """A model's tensors by their checkpoint's names, read where the model has them."""

    def __init__(self, model: CausalLM) -> None:
        self._destinations = model.destinations()
        self._spec = model.spec

    def read(self, name: str) -> torch.Tensor:
        return self._destinations[name].read().float().cpu()

    def of_layer(self, layer: int, name: str) -> torch.Tensor:
        return self.read(f"model.layers.{layer}.{name}.weight")

    def head_rows(self, token_ids_D: torch.Tensor) -> torch.Tensor:
        """[D, E]"""
        return self.read("lm_head.weight")[token_ids_D]


@torch.no_grad()
def initialise_eagle3(draft: Eagle3, model: CausalLM, seed: int) -> None:
    """The layer from the target's last one where shapes allow, the head from its head's rows, the
    fused state from the deepest features."""
    target, last = TargetTensors(model), model.spec.num_layers - 1
    generator = torch.Generator().manual_seed(seed)
    hidden = model.spec.hidden_size
    draft.fc.weight.normal_(0, _RESIDUAL_SCALE * hidden**-0.5, generator=generator)
    draft.fc.weight[:, -hidden:] += torch.eye(hidden)
    _copy_layer(draft.midlayer, target, last, generator)
    draft.midlayer.hidden_norm.weight.copy_(target.of_layer(last, "input_layernorm"))
    draft.norm.weight.copy_(target.read("model.norm.weight"))
    draft.lm_head.weight.copy_(target.head_rows(draft.vocabulary.token_ids_D))


def _copy_layer(
    layer: DecoderLayer, target: TargetTensors, index: int, generator: torch.Generator
) -> None:
    """Attention reads the hidden state with its last E columns; kv heads the target shares are
    repeated. What fits nowhere stays random."""
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear: nn.Linear = getattr(layer.self_attn, name)
        _fill(linear.weight, target.of_layer(index, f"self_attn.{name}"), generator)
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear = getattr(layer.mlp, name)
        _fill(linear.weight, target.of_layer(index, f"mlp.{name}"), generator)
    layer.post_attention_layernorm.weight.copy_(
        target.of_layer(index, "post_attention_layernorm")
    )
