"""Drafts to be trained: new ones for a target, and those a folder holds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Checkpoint
from rollout.models.rope_config import rope_fields
from rollout.models.spec import ModelSpec, read_json
from spec_workers.draft_training.draft import Embed, TrainableDraft
from spec_workers.draft_training.eagle3 import Eagle3
from spec_workers.draft_training.initialisation import initialise
from spec_workers.draft_training.mtp import MtpChain
from spec_workers.draft_training.target_tensors import DraftVocabulary
from spec_workers.draft_training.training_run import CONFIG

_TABLES = ("d2t", "t2d")


class DraftKind(enum.StrEnum):
    eagle3 = "eagle3"
    mtp = "mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The shape of a new draft: query heads as the target has, and its MLP's width where None."""

    kind: DraftKind
    chain_length: int = 2  # of an MTP chain
    num_kv_heads: int | None = None  # None: as many as query heads, for a layer that is alone
    ffn_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("chain_length", "num_kv_heads", "ffn_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInputError(name, value, "must be >= 1")

    def check_for(self, target: ModelSpec) -> None:
        """Raises InvalidInputError for a shape the target's does not allow."""
        kv_heads = self.num_kv_heads or target.num_heads
        if target.num_heads % kv_heads:
            raise InvalidInputError(
                "num_kv_heads", kv_heads, f"must divide the target's {target.num_heads} query heads"
            )
        layers = _feature_layers(target)
        if self.kind is DraftKind.eagle3 and layers != sorted(set(layers)):
            raise InvalidInputError(
                "model",
                f"{target.num_layers} layers",
                "an EAGLE-3 draft needs a target of 7 layers or more",
            )


def new_draft(
    shape: DraftShape,
    model: CausalLM,
    vocabulary: DraftVocabulary,
    seed: int,
) -> TrainableDraft:
    """An untrained draft of a loaded target.

    Raises InvalidInputError for a shape the target's does not allow.
    """
    spec = model.spec
    shape.check_for(spec)
    config = layer_fields(spec) | {
        "num_key_value_heads": shape.num_kv_heads or spec.num_heads,
        "intermediate_size": shape.ffn_size or spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "head_dim": spec.head_dim,
    }
    if shape.kind is DraftKind.mtp:
        config["num_nextn_predict_layers"] = shape.chain_length
    else:
        config["eagle_aux_hidden_state_layer_ids"] = _feature_layers(spec)
    draft = _network(shape.kind, config, vocabulary, model.embed)
    initialise(draft, model, seed)
    return draft


def layer_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields of config.json that a plain decoder layer shares with a model of this spec."""
    rope = rope_fields(spec.rope, spec.max_context_len)
    return {name: value for name, value in rope.items() if value is not None} | {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
    }


def stored_kind(config: Mapping[str, Any]) -> DraftKind | None:
    """By a draft's config.json; None: of no kind that can be trained."""
    names = config.get("architectures")
    return next((kind for kind in DraftKind if names == [_NAMES[kind]]), None)


def load_draft(folder: Path, embed: Embed) -> TrainableDraft:
    """A draft that `save_draft` wrote, to be trained on. ``embed``: the target's embedding.

    Raises CheckpointError for a folder that is incomplete or holds another kind of draft.
    """
    config = read_json(folder / CONFIG, "a draft's folder")
    kind = stored_kind(config)
    checkpoint = Checkpoint(folder, tables=_TABLES)
    if kind is None or "d2t" not in checkpoint.tensors:
        raise CheckpointError(
            f"{folder}: architectures={config.get('architectures')!r} is no draft that can be "
            f"trained; {', '.join(_NAMES.values())} with d2t and lm_head can"
        )
    offsets_D = checkpoint.read("d2t")
    token_ids_D = (offsets_D + torch.arange(len(offsets_D))).sort()
    vocabulary = DraftVocabulary(token_ids_D.values, config["vocab_size"])
    draft = _network(kind, config, vocabulary, embed)
    tensors = {
        name.removeprefix(draft.stored_prefix): tensor.float()
        for name, tensor in checkpoint
        if name not in _TABLES
    }
    head = tensors.get("lm_head.weight")
    if head is not None:  # its rows stand in the order of d2t
        tensors["lm_head.weight"] = head[token_ids_D.indices]
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return draft


_NAMES = {DraftKind.eagle3: "LlamaForCausalLMEagle3", DraftKind.mtp: "SpecrolloutMTP"}


def _feature_layers(target: ModelSpec) -> list[int]:
    """The layers whose inputs a new EAGLE-3 draft reads: low, middle and high, as its authors
    choose."""
    return [2, target.num_layers // 2, target.num_layers - 3]


def _network(
    kind: DraftKind, config: Mapping[str, Any], vocabulary: DraftVocabulary, embed: Embed
) -> TrainableDraft:
    """``config``: a draft's config.json, or what one will hold."""
    layer = dict(config) | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    spec = replace(ModelSpec.of(layer), qkv_bias=False, o_bias=False, mlp_bias=False)
    if kind is DraftKind.mtp:
        return MtpChain(spec, dict(config), config["num_nextn_predict_layers"], vocabulary, embed)
    features = AuxHiddenStates(layers=tuple(config["eagle_aux_hidden_state_layer_ids"]))
    return Eagle3(spec, dict(config), features, vocabulary, embed)
