"""Loads an MTP chain from a target's own checkpoint, or from a folder of the chain alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rollout.errors import CheckpointError
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Checkpoint
from rollout.models.draft_model import DraftFamily, DraftSpec, draft_weights, is_separate_chain
from rollout.models.eagle.eagle3 import target_token_ids
from rollout.models.eagle.layout import VOCABULARY_TABLES
from rollout.models.layers.rope import cos_sin_table
from rollout.models.layers.weight_loader import same_values
from rollout.models.mtp.layout import (
    IN_TARGET,
    SEPARATE,
    MtpLayout,
    StepNames,
    find_layout,
)
from rollout.models.mtp.step import ChainTensors, MtpStep
from rollout.models.spec import ModelSpec, read_json

_VOCABULARY_TABLE = "d2t"


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpChain:
    """A folder's chain, before its weights are read."""

    checkpoint: Checkpoint
    layout: MtpLayout
    steps: tuple[StepNames, ...]
    spec: DraftSpec

    @staticmethod
    def find(folder: Path, target: ModelSpec) -> MtpChain:
        """Find a chain by config.json and the names of tensors.

        Raises CheckpointError if there is no chain or it is for another target.
        """
        config = read_json(folder / "config.json", "a draft's folder")
        is_separate = is_separate_chain(folder)
        checkpoint = Checkpoint(folder, tables=VOCABULARY_TABLES)
        layouts = (SEPARATE,) if is_separate else IN_TARGET
        experts = None if is_separate else target.experts
        found = find_layout(layouts, checkpoint.tensors, target.num_layers)
        if found is None:
            known = ", ".join(layout.title for layout in layouts)
            raise CheckpointError(
                f"{folder}: no MTP chain among its tensors; known layouts are those of {known}"
            )
        layout, steps = found
        decoder = target
        if is_separate:
            as_llama = config | {"architectures": ["LlamaForCausalLM"]}
            decoder = ModelSpec.of(as_llama, max_context_len=target.max_context_len)
            _refuse_another_targets(folder, decoder, target)
        if experts is not None:
            at = f"{steps[0].decoder}.mlp.experts."
            is_sparse = any(name.startswith(at) for name in checkpoint.tensors)
            experts = replace(experts, layers=(0,)) if is_sparse else None
        decoder = replace(decoder, num_layers=1, linear_attention=None, experts=experts)
        table = checkpoint.tensors.get(_VOCABULARY_TABLE)
        spec = DraftSpec(
            family=DraftFamily.MTP,
            decoder=decoder,
            draft_vocab_size=decoder.vocab_size if table is None else table.shape[0],
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
                token_ids_D=self._token_ids(target.device),
            )
            for names in self.steps
        ]
        self._read_into(steps)
        return steps

    def tensors_for(self, steps: Sequence[MtpStep]) -> dict[str, str]:
        """The folder's tensors for a loaded chain: names there to names in the chain.

        Raises CheckpointError for a chain of another shape or with another vocabulary.
        """
        ids_D, held_D = self._token_ids(steps[0].device), steps[0].token_ids_D
        is_same = ids_D is held_D if ids_D is None or held_D is None else torch.equal(ids_D, held_D)
        if self.spec != steps[0].spec or not is_same:
            what = "vocabulary" if self.spec == steps[0].spec else "shape"
            raise CheckpointError(
                f"{self.checkpoint.folder}: a chain of another {what} than the one in use"
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

    def _token_ids(self, device: torch.device) -> torch.Tensor | None:
        if _VOCABULARY_TABLE not in self.checkpoint.tensors:
            return None
        token_ids_D = target_token_ids(
            self.checkpoint.read(_VOCABULARY_TABLE),
            None,
            self.spec.draft_vocab_size,
            self.spec.decoder.vocab_size,
        )
        if not bool((token_ids_D.diff() > 0).all()):
            raise CheckpointError(
                f"{self.checkpoint.folder}: the tokens of d2t must ascend; sort them, and the rows "
                "of draft.lm_head.weight with them"
            )
        return token_ids_D.to(device)

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


def _refuse_another_targets(folder: Path, decoder: ModelSpec, target: ModelSpec) -> None:
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(decoder, name), getattr(target, name)
        if own != wanted:
            raise CheckpointError(
                f"{folder}: a chain of {name}={own}, but the target's is {wanted}: it was trained "
                "for another target"
            )
