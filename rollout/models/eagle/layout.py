"""The published layouts of EAGLE drafts: recognising them, and mapping their names to ours.

* EAGLE, EAGLE-2: the authors' (SafeAILab/EAGLE, ``cnets1.py``), and HASS checkpoints, which share
  it: ``fc``, ``layers.0``; maybe an embedding, never a head or final norm.
* EAGLE-3: the authors' (``cnets.py``) and SpecForge's (``LlamaForCausalLMEagle3``): ``fc``,
  ``midlayer``, ``norm``, ``lm_head``, ``d2t``, ``t2d``; ``layers.0`` instead of ``midlayer``
  where vLLM wrote them.
* DFlash: the authors' (z-lab/dflash): ``fc``, ``hidden_norm``, ``layers.N``, ``norm``; config.json
  has ``block_size``, and ``mask_token_id`` and ``target_layer_ids`` in ``dflash_config``.
* vLLM's speculators: config.json has ``speculators_model_type``, and the layer's options in
  ``transformer_layer_config``. ``eagle3`` has vLLM's tensor names, ``eagle`` has ``fusion_fc`` and
  ``transformer``, ``dflash`` the authors' with a head and vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import CheckpointError, UnsupportedModelError
from rollout.models.checkpoint import listed
from rollout.models.config_fields import refuse_unimplemented
from rollout.models.draft_model import DraftFamily

VOCABULARY_TABLES = ("d2t", "t2d")
_MAX_BLOCK = 62  # an ancestor mask has a bit for each row of a block, and one for the context
_KNOWN = (
    "EAGLE's own (fc, layers.0 or midlayer), SpecForge's (fc, midlayer, lm_head), vLLM "
    "speculators' (speculators_model_type eagle, eagle3 or dflash), DFlash's own (fc, hidden_norm)"
)
# Options that change the arithmetic, with the values that leave it as implemented.
_IMPLEMENTED: Mapping[str, tuple[object, ...]] = {
    "logit_scale": (None, 1),
    "layernorms": (None, False),
    "parallel_drafting": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True),
    "use_mtp_layernorm": (None, False),
    "sample_from_anchor": (None, False),
    "fc_layernorm": (None, False),
    "eh_proj_before_attn": (None, False),
}
_ONE_LAYER: Mapping[str, tuple[object, ...]] = {
    "num_hidden_layers": (1, None),
    "is_causal": (None, True),
}
_OF_FAMILY: Mapping[DraftFamily, Mapping[str, tuple[object, ...]]] = {
    DraftFamily.EAGLE: _ONE_LAYER,
    DraftFamily.EAGLE3: _ONE_LAYER,
    DraftFamily.DFLASH: {"is_causal": (None, False)},
}
_RENAMED = {
    DraftFamily.EAGLE3: {"layers.0.": "midlayer."},
    DraftFamily.EAGLE: {"fusion_fc.": "fc.", "transformer.": "layers.0."},
    DraftFamily.DFLASH: {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleLayout:
    """A folder's layout, with its options resolved."""

    family: DraftFamily
    layer_config: Mapping[str, Any]  # of the decoder layer, in the format of a config.json
    canonical: Mapping[str, str]  # the checkpoint's tensor names to ours, without vocabulary tables
    draft_vocab_size: int | None  # None: the target's
    feature_layers: tuple[int, ...] | None  # layers whose input it reads; None: the defaults
    norm_before_residual: bool
    norm_output: bool
    block_size: int = 1
    mask_token_id: int = 0

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor, by our name without ``draft.``."""
        return f"draft.{name}" in self.canonical.values()


def eagle_layout(config: Mapping[str, Any], names: Iterable[str]) -> EagleLayout:
    """Recognise a folder by its config.json and the names of its tensors.

    Raises CheckpointError for an unknown layout, and UnsupportedModelError, naming the option, for
    one that is not implemented.
    """
    plain = {name: name.removeprefix("model.") for name in names}
    weights = {
        name: short
        for name, short in plain.items()
        if short.rpartition(".")[2] not in VOCABULARY_TABLES
        and not short.startswith("verifier_")  # the target's, copied for training
    }
    is_speculators = "speculators_model_type" in config
    family = _family(config, weights.values())
    nested = config.get("eagle_config") or config.get("dflash_config") or {}
    layer_config = config.get("transformer_layer_config") or {} if is_speculators else config
    for options in (config, layer_config, nested):
        implemented = {**_IMPLEMENTED, **_OF_FAMILY[family]}
        refuse_unimplemented(options, implemented, "an EAGLE or block draft")
    return EagleLayout(
        family=family,
        layer_config=layer_config,
        canonical={name: f"draft.{_renamed(short, family)}" for name, short in weights.items()},
        draft_vocab_size=config.get("draft_vocab_size"),
        feature_layers=_feature_layers(config, nested),
        **(_block(config, nested) if family is DraftFamily.DFLASH else {}),
        norm_before_residual=_norm_before_residual(config, is_speculators, family),
        norm_output=bool(config.get("norm_output") or nested.get("return_hidden_post_norm")),
    )


def _family(config: Mapping[str, Any], names: Iterable[str]) -> DraftFamily:
    found = set(names)
    declared = config.get("speculators_model_type")
    if declared is not None:
        if declared in _RENAMED:
            return DraftFamily(declared)
        raise UnsupportedModelError(
            f"config.json: speculators_model_type={declared!r} is not implemented; only "
            f"{', '.join(_RENAMED)} are"
        )
    if "fc.weight" in found:
        if "hidden_norm.weight" in found:
            return DraftFamily.DFLASH
        if found & {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}:
            return DraftFamily.EAGLE3
        if "layers.0.self_attn.q_proj.weight" in found:
            return DraftFamily.EAGLE
    raise CheckpointError(
        f"no known layout of an EAGLE draft: its tensors are {listed(sorted(found)) or 'none'}; "
        f"known are {_KNOWN}"
    )


def _renamed(name: str, family: DraftFamily) -> str:
    for theirs, ours in _RENAMED[family].items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _feature_layers(config: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose input is read. SpecForge's ``eagle_config`` and DFlash's ``dflash_config``
    number those before them."""
    entered = config.get("eagle_aux_hidden_state_layer_ids")
    entered = entered or config.get("aux_hidden_state_layer_ids")
    left = nested.get("eagle_aux_hidden_state_layer_ids") or nested.get("target_layer_ids")
    layers = entered or [layer + 1 for layer in left or ()]
    if not layers:
        return None
    if list(layers) != sorted(set(layers)):
        raise UnsupportedModelError(
            f"config.json: eagle_aux_hidden_state_layer_ids or target_layer_ids, {layers!r}, must "
            "ascend"
        )
    return tuple(layers)


def _block(config: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, int]:
    """The block's fields, which stand beside ``dflash_config`` or in it."""
    found = {name: nested.get(name, config.get(name)) for name in ("block_size", "mask_token_id")}
    for (name, value), minimum in zip(found.items(), (2, 0), strict=True):
        if type(value) is not int or not minimum <= value <= (_MAX_BLOCK if minimum else value):
            raise CheckpointError(
                f"config.json: {name}={value!r} of a block draft must be an integer from {minimum}"
                + (f" to {_MAX_BLOCK}" if minimum else "")
            )
    if not (nested.get("target_layer_ids") or config.get("aux_hidden_state_layer_ids")):
        raise CheckpointError(
            "config.json: dflash_config.target_layer_ids is missing; it must name the target's "
            "layers whose outputs a block draft reads"
        )
    return found


def _norm_before_residual(
    config: Mapping[str, Any], is_speculators: bool, family: DraftFamily
) -> bool:
    value = config.get("norm_before_residual")
    if value is None and is_speculators and family is DraftFamily.EAGLE3:
        raise CheckpointError(
            "config.json: norm_before_residual is missing; speculators takes that for false and "
            "vLLM for true, so say which the draft was trained with"
        )
    return bool(value)
