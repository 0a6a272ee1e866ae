"""A target's weights, read where the model has them, and the draft's part of its vocabulary.

Legend: E hidden, D draft vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rollout.models.causal_lm import CausalLM
from spec_workers.draft_training.sequences import TokenSequence


class TargetTensors:
    """By the checkpoint's names, as float32 copies on the CPU."""

    def __init__(self, model: CausalLM) -> None:
        self._spec = model.spec
        self._destinations = model.weight_loaders()

    def read(self, name: str) -> torch.Tensor:
        return self._destinations[name].read().float().cpu()

    def norm(self, name: str) -> torch.Tensor:
        """The factors of a norm."""
        weight_E = self.read(f"model.{name}.weight")
        return weight_E + 1 if self._spec.norm_unit_offset else weight_E

    def of_layer(self, layer: int, name: str) -> torch.Tensor | None:
        """None where the layer has none: experts are no MLP."""
        found = f"model.layers.{layer}.{name}.weight"
        return self.read(found) if found in self._destinations else None

    def queries(self, layer: int) -> torch.Tensor | None:
        """The layer's query projection, without the gates that may be beside each head."""
        weight_QE = self.of_layer(layer, "self_attn.q_proj")
        if weight_QE is None or not self._spec.gated_attention:
            return weight_QE
        by_head = weight_QE.unflatten(0, (self._spec.num_heads, 2, -1))
        return by_head[:, 0].flatten(0, 1)

    def head_rows(self, token_ids_D: torch.Tensor) -> torch.Tensor:
        """[D, E]"""
        return self.read("lm_head.weight")[token_ids_D.cpu()]


class DraftVocabulary:
    """Maps between the target's token ids and the draft's, which ascend with them."""

    def __init__(self, token_ids_D: torch.Tensor, vocab_size: int) -> None:
        """``token_ids_D``: int64, ascending."""
        self.token_ids_D = token_ids_D
        self.contains_V = torch.zeros(vocab_size, dtype=torch.bool)
        self.contains_V[token_ids_D] = True

    @classmethod
    def most_frequent(
        cls, sequences: Iterable[TokenSequence], size: int, vocab_size: int
    ) -> DraftVocabulary:
        """Counted in continuations; where fewer than ``size`` tokens occur there, prompts fill up,
        then the lowest ids."""
        counts_V = torch.zeros(vocab_size, dtype=torch.float64)
        for sequence in sequences:
            begin = sequence.first_root + 1
            continuation, prompt = sequence.token_ids_L[begin:], sequence.token_ids_L[:begin]
            counts_V += torch.bincount(continuation, minlength=vocab_size)
            counts_V += torch.bincount(prompt, minlength=vocab_size) * _PROMPT_COUNT
        best_D = counts_V.sort(descending=True, stable=True).indices[: min(size, vocab_size)]
        return cls(best_D.sort().values, vocab_size)

    @property
    def offsets_D(self) -> torch.Tensor:
        """``d2t`` as published: int64, the target's id less the draft's."""
        return self.token_ids_D - torch.arange(len(self.token_ids_D))

    def coverage(self, sequences: Iterable[TokenSequence]) -> float:
        """The share of continuations' tokens that the draft can name."""
        known = total = 0
        for sequence in sequences:
            continuation = sequence.token_ids_L[sequence.first_root + 1 :]
            known += int(self.contains_V[continuation].sum())
            total += len(continuation)
        return known / max(total, 1)


_PROMPT_COUNT = 1e-6  # less than one occurrence in a continuation, however long the prompts are
