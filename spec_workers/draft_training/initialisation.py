"""Where a draft's training begins: at what of the target can serve.

Legend: E hidden, D draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from rollout.models.causal_lm import CausalLM
from spec_workers.draft_training.decoder_layer import DecoderLayer
from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.eagle3 import Eagle3
from spec_workers.draft_training.mtp import MtpChain
from spec_workers.draft_training.target_tensors import TargetTensors

_SMALL = 0.1
"""Scale of what has no counterpart in the target, beside the usual for random weights."""

_SHY = 0.3
"""Scale of the final norm, beside the target's: what an untrained layer says is mostly wrong, and
the less sure it begins, the sooner training has it right."""


@torch.no_grad()
def initialise(draft: TrainableDraft, model: CausalLM, seed: int) -> None:
    """Layers from the target's last that attends, where shapes allow, the head from its head's
    rows."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, _SMALL * parameter.shape[1] ** -0.5, generator=generator)
    target = TargetTensors(model)
    last = model.spec.attention_layers[-1]
    input_norm_E = target.norm(f"layers.{last}.input_layernorm")
    final_norm_E = _SHY * target.norm("norm")
    if isinstance(draft, Eagle3):
        _pass_on(draft.fc, model.spec.hidden_size)
        _copy_layer(draft.midlayer, target, last)
        draft.midlayer.hidden_norm.weight.copy_(input_norm_E)
        draft.norm.weight.copy_(final_norm_E)
        draft.lm_head.weight.copy_(target.head_rows(draft.vocabulary.token_ids_D))
    else:
        assert isinstance(draft, MtpChain)
        for step in draft.steps():
            _pass_on(step.eh_proj, model.spec.hidden_size)
            _copy_layer(step, target, last)
            step.input_layernorm.weight.copy_(input_norm_E)
            step.norm.weight.copy_(final_norm_E)
        draft.lm_head.weight.copy_(target.head_rows(draft.vocabulary.token_ids_D))


def _pass_on(linear: nn.Linear, hidden: int) -> None:
    """The last E inputs go through as they are."""
    linear.weight[:, -hidden:] += torch.eye(hidden)


def _copy_layer(layer: DecoderLayer, target: TargetTensors, index: int) -> None:
    """Copy what both layers have room for. Attention reads the hidden state with its last E
    columns."""
    theirs_of = {"q_proj": target.queries(index)} | {
        name: target.of_layer(index, f"self_attn.{name}") for name in ("k_proj", "v_proj")
    }
    for name, theirs in theirs_of.items():
        ours: torch.Tensor = getattr(layer.self_attn, name).weight
        assert theirs is not None
        if name != "q_proj" and len(ours) % len(theirs) == 0:
            theirs = _repeated(theirs, len(ours), layer.self_attn.head_dim)
        _copy_common(ours[:, -theirs.shape[1] :], theirs)
    _copy_common(layer.self_attn.o_proj.weight, target.of_layer(index, "self_attn.o_proj"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy_common(getattr(layer.mlp, name).weight, target.of_layer(index, f"mlp.{name}"))
    norm_E = target.norm(f"layers.{index}.post_attention_layernorm")
    layer.post_attention_layernorm.weight.copy_(norm_E)


def _repeated(heads_CE: torch.Tensor, rows: int, head_dim: int) -> torch.Tensor:
    """Each kv head as often as it takes to have so many rows."""
    heads = heads_CE.unflatten(0, (-1, head_dim))
    return heads.repeat_interleave(rows // len(heads_CE), dim=0).flatten(0, 1)


def _copy_common(ours: torch.Tensor, theirs: torch.Tensor | None) -> None:
    if theirs is None:
        return
    rows, columns = (min(sizes) for sizes in zip(ours.shape, theirs.shape, strict=True))
    ours[:rows, :columns] = theirs[:rows, :columns]
