"""Makes drafts to train: new ones, with initial weights from the target, and stored ones.

Legend: E hidden, D draft vocabulary, Q outputs of a query projection, C of a kv projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Checkpoint
from rollout.models.rope_config import rope_fields
from rollout.models.spec import ModelSpec, read_json
from spec_workers.draft_training.block_draft import BlockLayer, TrainableDFlash
from spec_workers.draft_training.decoder_layer import TrainableDecoderLayer
from spec_workers.draft_training.draft import (
    DraftVocabulary,
    Embed,
    TrainableDraft,
    TrainableEagle3,
)
from spec_workers.draft_training.training_run import CONFIG

ARCHITECTURES = {"eagle3": TrainableEagle3.architecture, "block": TrainableDFlash.architecture}
"""The kinds of drafts that can be trained."""

_BLOCK_SIZE, _BLOCK_LAYERS = 4, 2
_TABLES = ("d2t", "t2d")
_MAX_PADDING = 1024  # tokens of a vocabulary


def check_target(target: ModelSpec) -> None:
    """Raise InvalidInputError for a target of which no draft can be made."""
    if target.latent is not None:
        raise InvalidInputError(
            "model", target.architecture, "has latent attention, for which no draft can be made"
        )
    layers = _feature_layers(target)
    if layers != sorted(set(layers)):
        raise InvalidInputError(
            "model",
            f"{target.num_layers} layers",
            "an EAGLE-3 draft needs a target of 7 layers or more",
        )


def new_draft(
    model: CausalLM, vocabulary: DraftVocabulary, seed: int, kind: str = "eagle3"
) -> TrainableDraft:
    """An untrained draft of a loaded target, with the target's sizes, but as many kv heads as query
    heads.

    Raises InvalidInputError for a target of which no draft can be made.
    """
    spec = model.spec
    check_target(spec)
    config = layer_fields(spec) | {
        "num_key_value_heads": spec.num_heads,
        "intermediate_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "head_dim": spec.head_dim,
    }
    if kind == "block":
        config |= {
            "architectures": [TrainableDFlash.architecture],
            "num_hidden_layers": min(_BLOCK_LAYERS, len(spec.attention_layers)),
            "block_size": _BLOCK_SIZE,
            "dflash_config": {
                "target_layer_ids": [layer - 1 for layer in _feature_layers(spec)],
                "mask_token_id": _mask_token(model.embed, spec.vocab_size),
            },
        }
    else:
        config["eagle_aux_hidden_state_layer_ids"] = _feature_layers(spec)
    draft = _network(config, vocabulary, model.embed)
    initialise(draft, model, seed)
    return draft


def _mask_token(embed: Embed, vocab_size: int) -> int:
    """The last token, or where it is a row of padding, the last whose embedding is not zero.

    Raises InvalidInputError where the last ones' all are: a draft would know no mask from another.
    """
    first = max(0, vocab_size - _MAX_PADDING)
    rows_NE = embed(torch.arange(first, vocab_size))
    used = rows_NE.count_nonzero(dim=1).nonzero()
    if not len(used):
        raise InvalidInputError(
            "model", f"{len(rows_NE)} last embeddings", "all are zero: a block needs a mask token"
        )
    return first + int(used[-1])


def layer_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of config.json that a draft's plain decoder layer takes from the target."""
    rope = rope_fields(spec.rope, spec.max_context_len)
    return {name: value for name, value in rope.items() if value is not None} | {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
    }


def load_draft(folder: Path, embed: Embed) -> TrainableDraft:
    """A draft that `save_draft` wrote, for more training. ``embed``: the target's embedding.

    Raises CheckpointError for a folder that is incomplete or holds another kind of draft.
    """
    config = read_json(folder / CONFIG, "a draft's folder")
    name = " or ".join(ARCHITECTURES.values())
    checkpoint = Checkpoint(folder, tables=_TABLES)
    if (
        config.get("architectures") not in [[each] for each in ARCHITECTURES.values()]
        or "d2t" not in checkpoint.tensors
    ):
        raise CheckpointError(
            f"{folder}: architectures={config.get('architectures')!r} is not a draft "
            f"that can be trained; {name} with d2t and lm_head is"
        )
    offsets_D = checkpoint.read("d2t")
    token_ids_D = (offsets_D + torch.arange(len(offsets_D))).sort()
    vocabulary = DraftVocabulary(token_ids_D.values, config["vocab_size"])
    qk_norm = any(name.endswith("q_norm.weight") for name in checkpoint.tensors)
    draft = _network(config, vocabulary, embed, qk_norm=qk_norm)
    tensors = {name: tensor.float() for name, tensor in checkpoint if name not in _TABLES}
    head = tensors.get("lm_head.weight")
    if head is not None:  # its rows are in the order of d2t
        tensors["lm_head.weight"] = head[token_ids_D.indices]
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return draft


def _feature_layers(target: ModelSpec) -> list[int]:
    """The layers whose inputs a new EAGLE-3 draft reads: low, middle and high, as in the paper."""
    return [2, target.num_layers // 2, target.num_layers - 3]


def _network(
    config: Mapping[str, Any],
    vocabulary: DraftVocabulary,
    embed: Embed,
    *,
    qk_norm: bool = False,
) -> TrainableDraft:
    """An untrained network. ``config``: the fields of its config.json."""
    layer = {"num_hidden_layers": 1} | dict(config) | {"architectures": ["LlamaForCausalLM"]}
    spec = replace(
        ModelSpec.of(layer), qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=qk_norm
    )
    shared = {name: value for name, value in config.items() if name != "architectures"}
    if block := config.get("dflash_config"):
        features = AuxHiddenStates(layers=tuple(layer + 1 for layer in block["target_layer_ids"]))
        return TrainableDFlash(
            spec, shared, features, vocabulary, embed,
            block_size=config["block_size"], mask_token_id=block["mask_token_id"],
        )  # fmt: skip
    features = AuxHiddenStates(layers=tuple(config["eagle_aux_hidden_state_layer_ids"]))
    return TrainableEagle3(spec, shared, features, vocabulary, embed)


class TargetTensors:
    """A target's weights by the checkpoint's names, as float32 copies on the CPU."""

    def __init__(self, model: CausalLM) -> None:
        self._spec = model.spec
        self._loaders = model.weight_loaders()

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name."""
        return self._loaders[name].read().float().cpu()

    def norm(self, name: str) -> torch.Tensor:
        """The factors of a norm, with its offset added, [E]. Ones if the model has no such norm."""
        found = f"model.{name}.weight"
        if found not in self._loaders:
            return torch.ones(self._spec.hidden_size)
        weight_E = self.read(found)
        return weight_E + 1 if self._spec.norm_unit_offset else weight_E

    def of_layer(self, layer: int, name: str) -> torch.Tensor | None:
        """A weight of a layer; None if the layer lacks it, as one with experts lacks an MLP."""
        found = f"model.layers.{layer}.{name}.weight"
        return self.read(found) if found in self._loaders else None

    def queries(self, layer: int) -> torch.Tensor | None:
        """The layer's query projection, without the gates of a gated attention."""
        weight_QE = self.of_layer(layer, "self_attn.q_proj")
        if weight_QE is None or not self._spec.gated_attention:
            return weight_QE
        by_head = weight_QE.unflatten(0, (self._spec.num_heads, 2, -1))
        return by_head[:, 0].flatten(0, 1)

    def head_rows(self, token_ids_D: torch.Tensor) -> torch.Tensor:
        """The head's rows of these tokens, [D, E]."""
        return self.read("lm_head.weight")[token_ids_D.cpu()]


_SMALL = 0.1
"""Scale, relative to the usual one, of random weights without a counterpart in the target."""

_FINAL_NORM_SCALE = 0.3
"""Scale of the final norm relative to the target's. An untrained layer is mostly wrong, so it
should begin unsure: training then corrects it sooner."""


@torch.no_grad()
def initialise(draft: TrainableDraft, model: CausalLM, seed: int) -> None:
    """Copy the target's last attention layer, or as many as the draft has, and rows of its head.

    The rest is random, by ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, _SMALL * parameter.shape[1] ** -0.5, generator=generator)
    target = TargetTensors(model)
    last = model.spec.attention_layers[-1]
    input_norm_E = target.norm(f"layers.{last}.input_layernorm")
    final_norm_E = _FINAL_NORM_SCALE * target.norm("norm")
    hidden = model.spec.hidden_size
    draft.fc.weight[:, -hidden:] += torch.eye(hidden)  # the last hidden state passes through
    if isinstance(draft, TrainableDFlash):
        draft.hidden_norm.weight.copy_(input_norm_E)
        copied = model.spec.attention_layers[-len(draft.layers) :]
        for layer, index in zip(draft.layers, copied, strict=True):
            assert isinstance(layer, BlockLayer)
            _copy_layer(layer, target, index)
            layer.input_layernorm.weight.copy_(target.norm(f"layers.{index}.input_layernorm"))
    elif isinstance(draft, TrainableEagle3):
        _copy_layer(draft.midlayer, target, last)
        draft.midlayer.hidden_norm.weight.copy_(input_norm_E)
    draft.norm.weight.copy_(final_norm_E)
    draft.lm_head.weight.copy_(target.head_rows(draft.vocabulary.token_ids_D))


def _copy_layer(layer: TrainableDecoderLayer, target: TargetTensors, index: int) -> None:
    """Copy what the target's layer has. Its kv heads are repeated for each of their query heads."""
    attention, head_dim = layer.self_attn, layer.self_attn.head_dim
    _copy(attention.q_proj, target.queries(index))
    for name in ("k_proj", "v_proj"):
        linear, heads_CE = getattr(attention, name), target.of_layer(index, f"self_attn.{name}")
        assert heads_CE is not None
        repeats = len(linear.weight) // len(heads_CE)
        heads = heads_CE.unflatten(0, (-1, head_dim)).repeat_interleave(repeats, dim=0)
        _copy(linear, heads.flatten(0, 1))
    _copy(attention.o_proj, target.of_layer(index, "self_attn.o_proj"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy(getattr(layer.mlp, name), target.of_layer(index, f"mlp.{name}"))
    norm_E = target.norm(f"layers.{index}.post_attention_layernorm")
    layer.post_attention_layernorm.weight.copy_(norm_E)


def _copy(linear: nn.Linear, weight: torch.Tensor | None) -> None:
    """Copy a weight, if there is one, to the last columns: there attention reads hidden states."""
    if weight is not None:
        linear.weight[:, -weight.shape[1] :] = weight
