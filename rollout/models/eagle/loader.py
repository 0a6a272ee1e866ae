"""Loads an EAGLE or block draft from a folder.

Legend: D draft vocabulary, V the target's vocabulary, E hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Checkpoint
from rollout.models.draft_model import DraftFamily, DraftSpec, draft_weights
from rollout.models.eagle.dflash import DFlash
from rollout.models.eagle.eagle import Eagle
from rollout.models.eagle.eagle3 import Eagle3, Eagle3Options, target_token_ids
from rollout.models.eagle.layout import VOCABULARY_TABLES, EagleLayout, eagle_layout
from rollout.models.layers.weight_loader import same_values
from rollout.models.spec import ModelSpec, read_json

_COMPARED_ROWS = 4096
_EMBEDDING = "embed_tokens.weight"
EagleModel = Eagle | Eagle3 | DFlash


@dataclass(frozen=True, slots=True)
class _Folder:
    checkpoint: Checkpoint
    layout: EagleLayout
    spec: DraftSpec


def read_eagle_spec(folder: str | Path, target: ModelSpec) -> DraftSpec:
    """The spec of a draft, from config.json and headers.

    Its layer has as many positions as the target, whatever its config says. Raises CheckpointError
    for a folder that is incomplete, of an unknown layout or for another target, and
    UnsupportedModelError for options that are not implemented.
    """
    return _opened(Path(folder), target).spec


def load_eagle(folder: str | Path, target: CausalLM) -> EagleModel:
    """Load an EAGLE, EAGLE-2, EAGLE-3 or DFlash draft for a loaded target, in its dtype and on its
    device.

    It shares the target's embedding unless the folder has one with other values. Raises what
    `read_eagle_spec` raises, and CheckpointError for tensors that are missing, unexpected or of
    another shape.
    """
    opened = _opened(Path(folder), target.spec)
    checkpoint, names = opened.checkpoint, dict(opened.layout.canonical)
    with _naming(checkpoint.folder):
        draft = _built(opened, target)
    if draft.embedding_VE is None and opened.layout.has(_EMBEDDING):
        del names[_stored_name(opened.layout, _EMBEDDING)]
    checkpoint.load_into(draft.weight_loaders(), names)
    draft.finish_loading()
    return draft


def tensors_for(
    folder: str | Path, draft: EagleModel, target: CausalLM
) -> tuple[Checkpoint, dict[str, str]]:
    """A folder's checkpoint, and its tensors for a loaded draft: names there to names here.

    Raises what `read_eagle_spec` raises, and CheckpointError for a draft of another shape or with
    another vocabulary.
    """
    opened = _opened(Path(folder), target.spec)
    checkpoint, layout = opened.checkpoint, opened.layout
    with _naming(checkpoint.folder):
        ids_D = _token_ids(checkpoint, opened.spec, target.spec.vocab_size)
        held_D = draft.stored_ids_D
        if opened.spec != draft.spec or (
            isinstance(draft, Eagle3)
            and draft.options != _options(layout, draft.options.own_embedding)
        ):
            raise CheckpointError("a draft of another shape than the one in use")
        if ids_D is not held_D and (
            ids_D is None or held_D is None or not torch.equal(ids_D, held_D)
        ):
            raise CheckpointError("a draft of another vocabulary than the one in use")
        names = dict(layout.canonical)
        if draft.embedding_VE is None and layout.has(_EMBEDDING):
            stored = _stored_name(layout, _EMBEDDING)
            if _is_targets(checkpoint.read(stored), target):
                del names[stored]
    return checkpoint, names


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Add the folder to the messages of errors about its contents."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        raise type(error)(f"{folder}: {error}") from error


def _opened(folder: Path, target: ModelSpec) -> _Folder:
    if not folder.is_dir():
        raise CheckpointError(f"draft {str(folder)!r}: no such folder")
    config = read_json(folder / "config.json", "a draft's folder")
    checkpoint = Checkpoint(folder, tables=VOCABULARY_TABLES)
    with _naming(folder):
        layout = eagle_layout(config, checkpoint.tensors)
        return _Folder(checkpoint, layout, _spec(config, layout, target))


def _spec(config: Mapping[str, Any], layout: EagleLayout, target: ModelSpec) -> DraftSpec:
    layer = dict(layout.layer_config)
    layer["architectures"] = ["LlamaForCausalLM"]
    at = "midlayer" if layout.family is DraftFamily.EAGLE3 else "layers.0"
    if layout.family is not DraftFamily.DFLASH:
        layer["num_hidden_layers"] = 1
    elif "sliding_attention" in (layer.get("layer_types") or ()):
        raise UnsupportedModelError(
            "config.json: layer_types with sliding_attention is not implemented for a block draft"
        )
    else:
        layer["sliding_window"] = None
    if not layer.get("use_sliding_window", True):
        layer["sliding_window"] = None
    decoder = replace(
        ModelSpec.of(layer),
        vocab_size=target.vocab_size,
        max_context_len=target.max_context_len,
        qkv_bias=layout.has(f"{at}.self_attn.q_proj.bias"),
        o_bias=layout.has(f"{at}.self_attn.o_proj.bias"),
        mlp_bias=layout.has(f"{at}.mlp.down_proj.bias"),
        qk_norm=layout.has(f"{at}.self_attn.q_norm.weight"),
    )
    for size in (config.get("target_hidden_size"), layer.get("target_hidden_size")):
        if size not in (None, target.hidden_size):
            raise CheckpointError(
                f"config.json: target_hidden_size={size}, but the target's is {target.hidden_size}"
            )
    if layout.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"config.json: mask_token_id={layout.mask_token_id}, but the target has "
            f"{target.vocab_size} tokens: it must be one of them"
        )
    return DraftSpec(
        family=layout.family,
        decoder=decoder,
        draft_vocab_size=layout.draft_vocab_size or target.vocab_size,
        features=_features(layout, target.num_layers),
        target_hidden_size=target.hidden_size,
        block_size=layout.block_size,
        mask_token_id=layout.mask_token_id,
    )


def _features(layout: EagleLayout, num_layers: int) -> AuxHiddenStates:
    if layout.family is DraftFamily.EAGLE:
        return AuxHiddenStates(final=True)
    layers = layout.feature_layers or (2, num_layers // 2, num_layers - 3)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise CheckpointError(
            f"the draft reads the streams entering layers {list(layers)}, the target has "
            f"{num_layers}; config.json's eagle_aux_hidden_state_layer_ids or target_layer_ids "
            "says otherwise"
        )
    return AuxHiddenStates(layers=layers)


def _built(opened: _Folder, target: CausalLM) -> EagleModel:
    checkpoint, layout, spec = opened.checkpoint, opened.layout, opened.spec
    own_embedding = layout.has(_EMBEDDING) and not _is_targets(
        checkpoint.read(_stored_name(layout, _EMBEDDING)), target
    )
    _require_width(spec, layout, target.spec, own_embedding)
    weights = draft_weights(target)
    if spec.family is DraftFamily.EAGLE:
        fc_bias = layout.has("fc.bias")
        return Eagle(spec, target, weights, own_embedding=own_embedding, fc_bias=fc_bias)
    options = _options(layout, own_embedding)
    stored_ids_D = _token_ids(checkpoint, spec, target.spec.vocab_size)
    if spec.family is DraftFamily.DFLASH:
        return DFlash(
            spec, target, weights, own_embedding=own_embedding, own_head=options.own_head,
            stored_ids_D=stored_ids_D,
        )  # fmt: skip
    return Eagle3(spec, target, weights, options=options, stored_ids_D=stored_ids_D)


def _options(layout: EagleLayout, own_embedding: bool) -> Eagle3Options:
    return Eagle3Options(
        own_embedding=own_embedding,
        own_head=layout.has("lm_head.weight"),
        fc_bias=layout.has("fc.bias"),
        norm_before_fc=layout.has("input_norm.weight"),
        norm_each_feature=layout.has("fc_norm.0.weight"),
        norm_before_residual=layout.norm_before_residual,
        norm_output=layout.norm_output,
    )


def _require_width(
    spec: DraftSpec, layout: EagleLayout, target: ModelSpec, own_embedding: bool
) -> None:
    """Raise unless the draft can share the target's embedding and head where it has none."""
    own_head = layout.has("lm_head.weight")
    if not own_head and spec.draft_vocab_size != target.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size={spec.draft_vocab_size} without lm_head.weight: the target's head "
            f"has {target.vocab_size} rows"
        )
    if not own_head and layout.layer_config.get("tie_word_embeddings") and own_embedding:
        raise UnsupportedModelError(
            "tie_word_embeddings=True with an embedding of its own and no lm_head.weight is not "
            "implemented for an EAGLE draft"
        )
    if spec.hidden_size != target.hidden_size and not (own_embedding and own_head):
        raise CheckpointError(
            f"the draft's hidden size is {spec.hidden_size}, the target's {target.hidden_size}: "
            "such a draft needs embed_tokens.weight and lm_head.weight of its own"
        )


@torch.inference_mode()
def _is_targets(embedding_VE: torch.Tensor, target: CausalLM) -> bool:
    vocab_size, hidden = target.spec.vocab_size, target.spec.hidden_size
    if tuple(embedding_VE.shape) != (vocab_size, hidden):
        return False
    starts = range(0, vocab_size, _COMPARED_ROWS)
    rows = torch.arange(vocab_size, device=target.device).split(_COMPARED_ROWS)
    return all(
        same_values(embedding_VE[start : start + len(part)], target.embed(part))
        for start, part in zip(starts, rows, strict=True)
    )


def _token_ids(checkpoint: Checkpoint, spec: DraftSpec, vocab_size: int) -> torch.Tensor | None:
    """The target's token of each draft token, in the checkpoint's order; None: the same ids."""
    tables = {
        name.rpartition(".")[2]: name
        for name in checkpoint.tensors
        if name.rpartition(".")[2] in VOCABULARY_TABLES
    }
    if "d2t" not in tables:
        if spec.draft_vocab_size != vocab_size:
            raise CheckpointError(
                f"draft_vocab_size={spec.draft_vocab_size} of {vocab_size} tokens, but d2t, which "
                "says which, is missing"
            )
        return None
    t2d = checkpoint.read(tables["t2d"]) if "t2d" in tables else None
    d2t = checkpoint.read(tables["d2t"])
    ids_D = target_token_ids(d2t, t2d, spec.draft_vocab_size, vocab_size)
    return None if torch.equal(ids_D, torch.arange(vocab_size)) else ids_D


def _stored_name(layout: EagleLayout, name: str) -> str:
    return next(theirs for theirs, ours in layout.canonical.items() if ours == f"draft.{name}")
