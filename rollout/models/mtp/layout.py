"""The layouts of MTP chains in checkpoints.

All are the same network with other names (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section
2.2): a decoder layer over a projection of two normed vectors, the embedding of a token and the
hidden state of the position before. Layouts also differ in the order of the two vectors, and in
whether the first step reads the target's hidden state before or after its final norm. Each later
step reads the output of the step before after that step's final norm, like the head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout.models.aux_hidden_states import AuxHiddenStates


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpLayout:
    """Names of a chain's tensors. ``{step}`` counts steps from 0, ``{layer}`` from the target's
    number of layers. All steps share a tensor whose name has neither."""

    title: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    decoder: str  # prefix of the decoder layer's names
    final_norm: str
    hidden_first: bool  # the projection's input is [hidden, embedding], else [embedding, hidden]
    before_final_norm: bool  # the first step reads the target's state before its final norm
    embedding: str | None = None  # a copy of the target's that checkpoints may have
    head: str | None = None  # a copy of the target's, or the step's own

    def features(self, num_layers: int) -> AuxHiddenStates:
        """The hidden states that the chain reads of a target with ``num_layers`` layers."""
        if self.before_final_norm:
            return AuxHiddenStates(layers=(num_layers,))
        return AuxHiddenStates(final=True)


MIMO = MtpLayout(
    title="MiMo",
    embedding_norm="model.mtp_layers.{step}.token_layernorm.weight",
    hidden_norm="model.mtp_layers.{step}.hidden_layernorm.weight",
    projection="model.mtp_layers.{step}.input_proj.weight",
    decoder="model.mtp_layers.{step}",
    final_norm="model.mtp_layers.{step}.final_layernorm.weight",
    hidden_first=True,
    before_final_norm=True,
)
QWEN3_NEXT = MtpLayout(
    title="Qwen3-Next (Qwen3.5)",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    decoder="mtp.layers.{step}",
    final_norm="mtp.norm.weight",
    hidden_first=False,
    before_final_norm=False,
)
DEEPSEEK_V3 = MtpLayout(
    title="DeepSeek-V3",
    embedding_norm="model.layers.{layer}.enorm.weight",
    hidden_norm="model.layers.{layer}.hnorm.weight",
    projection="model.layers.{layer}.eh_proj.weight",
    decoder="model.layers.{layer}",
    final_norm="model.layers.{layer}.shared_head.norm.weight",
    hidden_first=False,
    before_final_norm=False,
    embedding="model.layers.{layer}.embed_tokens.weight",
    head="model.layers.{layer}.shared_head.head.weight",
)
LAYOUTS = (MIMO, QWEN3_NEXT, DEEPSEEK_V3)


@dataclass(frozen=True, slots=True)
class StepNames:
    """The names of one step's tensors."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    decoder: str
    final_norm: str
    embedding: str | None  # None: the target's
    head: str | None  # None: the target's


def find_layout(names: Iterable[str], num_layers: int) -> tuple[MtpLayout, list[StepNames]] | None:
    """The first layout whose tensors are among ``names``, and its steps; None if there is none.

    ``num_layers``: the target's.
    """
    present = frozenset(names)
    for layout in LAYOUTS:
        steps: list[StepNames] = []
        while (names_of := _step_names(layout, len(steps), num_layers, present)) is not None:
            steps.append(names_of)
        if steps:
            return layout, steps
    return None


def _step_names(
    layout: MtpLayout, step: int, num_layers: int, present: frozenset[str]
) -> StepNames | None:
    """The names of a step, or None if the checkpoint does not have it."""

    def at(name: str) -> str:
        return name.format(step=step, layer=num_layers + step)

    def optional(name: str | None) -> str | None:
        return at(name) if name is not None and at(name) in present else None

    projection, decoder = at(layout.projection), at(layout.decoder)
    if projection not in present or not any(name.startswith(f"{decoder}.") for name in present):
        return None
    return StepNames(
        embedding_norm=at(layout.embedding_norm),
        hidden_norm=at(layout.hidden_norm),
        projection=projection,
        decoder=decoder,
        final_norm=at(layout.final_norm),
        embedding=optional(layout.embedding),
        head=optional(layout.head),
    )
