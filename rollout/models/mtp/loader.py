"""Loads an MTP chain from a target's own checkpoint, or from another of its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollout.errors import CheckpointError
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Checkpoint
from rollout.models.draft_model import DraftFamily, DraftSpec, draft_weights
from rollout.models.layers.rope import cos_sin_table
from rollout.models.layers.weight_loader import same_values
from rollout.models.mtp.layout import (
    LAYOUTS,
    MtpLayout,
    StepNames,
    find_layout,
)
from rollout.models.mtp.step import ChainTensors, MtpStep
from rollout.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpChain:
    """A folder's chain, before its weights are read."""

    checkpoint: Checkpoint
    layout: MtpLayout
    steps: tuple[StepNames, ...]
    spec: DraftSpec

    @staticmethod
    def find(folder: Path, target: ModelSpec) -> MtpChain:
        """Find a chain by the names of tensors. Raises CheckpointError if there is none."""
        checkpoint = Checkpoint(folder)
        experts = target.experts
        found = find_layout(checkpoint.tensors, target.num_layers)
        if found is None:
            known = ", ".join(layout.title for layout in LAYOUTS)
            raise CheckpointError(
                f"{folder}: no MTP chain among its tensors; known layouts are those of {known}"
            )
        layout, steps = found
        if experts is not None:
            at = f"{steps[0].decoder}.mlp.experts."
            is_sparse = any(name.startswith(at) for name in checkpoint.tensors)
            experts = replace(experts, layers=(0,)) if is_sparse else None
        decoder = replace(target, num_layers=1, linear_attention=None, experts=experts)
        spec = DraftSpec(
            family=DraftFamily.MTP,
            decoder=decoder,
            draft_vocab_size=decoder.vocab_size,
            features=layout.features(target.num_layers),
            target_hidden_size=target.hidden_size,
            num_steps=len(steps),
        )
        return MtpChain(checkpoint=checkpoint, layout=layout, steps=tuple(steps), spec=spec)

    def load(self, target: CausalLM) -> list[MtpStep]:
        """The chain's steps in order, in the target's dtype and on its device.

        Raises CheckpointError for missing and unknown tensors and wrong shapes before reading any.
        """
        decoder = self.spec.decoder
        tensors = ChainTensors(draft_weights(target))
        cos_sin_PD = cos_sin_table(
            decoder.rope, decoder.rotary_dim, decoder.max_context_len, target.device
        )
        steps = [
            MtpStep(
                self.spec,
                target,
                self._own_names(names, target),
                tensors,
                cos_sin_PD=cos_sin_PD,
                hidden_first=self.layout.hidden_first,
            )
            for names in self.steps
        ]
        self._read_into(steps)
        return steps

    def tensors_for(self, steps: Sequence[MtpStep]) -> dict[str, str]:
        """The folder's tensors for a loaded chain: names there to names in the chain.

        Raises CheckpointError for a chain of another shape.
        """
        if self.spec != steps[0].spec:
            raise CheckpointError(
                f"{self.checkpoint.folder}: a chain of another shape than the one in use"
            )
        weight_loaders = {name for step in steps for name in step.weight_loaders()}
        return {name: name for name in self.checkpoint.tensors if name in weight_loaders}

    def _own_names(self, names: StepNames, target: CausalLM) -> StepNames:
        """``names`` without copies of the target's embedding and head, which the chain shares."""
        held = target.weight_loaders()

        def own(name: str | None, of_target: str) -> str | None:
            if name is None or self.checkpoint.tensors[name].shape != held[of_target].shape:
                return name
            is_copy = same_values(self.checkpoint.read(name), held[of_target].read())
            return None if is_copy else name

        return replace(
            names,
            embedding=own(names.embedding, "model.embed_tokens.weight"),
            head=own(names.head, "lm_head.weight"),
        )

    def _read_into(self, steps: list[MtpStep]) -> None:
        weight_loaders = {
            name: loader for step in steps for name, loader in step.weight_loaders().items()
        }
        prefixes = tuple(f"{step.names.decoder}." for step in steps)
        passed_over = {name for names in self.steps for name in (names.embedding, names.head)}
        names = {
            name: name
            for name in self.checkpoint.tensors
            if name in weight_loaders or (name.startswith(prefixes) and name not in passed_over)
        }
        self.checkpoint.load_into(weight_loaders, names)
        for step in steps:
            step.finish_loading()
