"""EAGLE-3 (Li et al. 2025) for training: one decoder layer over three fused hidden states.

Legend: T rows of all sequences, S those that guess, L tokens of one sequence, M = L - 2 of its
rows, R rows of a level, F feature columns, E hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.layers.rope import cos_sin_table
from rollout.models.spec import ModelSpec
from spec_workers.draft_training.decoder_layer import (
    KeysValues,
    RmsNorm,
    TrainableDecoderLayer,
    attend,
)
from spec_workers.draft_training.packed_rows import PackedRows
from spec_workers.draft_training.sequences import TokenSequence

Embed = Callable[[torch.Tensor], torch.Tensor]
"""The target's embedding: token ids [R] to [R, E]. It is not trained."""

Chain = list[KeysValues]
"""Keys and values of a row's ancestors below its root, the nearest to the root first."""


_PROMPT_COUNT = 1e-6  # less than one occurrence in a continuation, however long the prompts are


class DraftVocabulary:
    """The target's tokens that a draft can name. Draft ids ascend with the target's."""

    def __init__(self, token_ids_D: torch.Tensor, vocab_size: int) -> None:
        """``token_ids_D``: int64, ascending."""
        self.token_ids_D = token_ids_D
        self.contains_V = torch.zeros(vocab_size, dtype=torch.bool)
        self.contains_V[token_ids_D] = True

    @classmethod
    def most_frequent(
        cls, sequences: Iterable[TokenSequence], size: int, vocab_size: int
    ) -> DraftVocabulary:
        """The ``size`` most frequent tokens of continuations.

        If fewer occur there, prompts' tokens follow, then the lowest ids.
        """
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
        """``d2t`` as in published drafts: int64, the target's id minus the draft's."""
        return self.token_ids_D - torch.arange(len(self.token_ids_D))

    def coverage(self, sequences: Iterable[TokenSequence]) -> float:
        """The share of the continuations' tokens that the draft can name."""
        known = total = 0
        for sequence in sequences:
            continuation = sequence.token_ids_L[sequence.first_root + 1 :]
            known += int(self.contains_V[continuation].sum())
            total += len(continuation)
        return known / max(total, 1)


class MidLayer(TrainableDecoderLayer):
    """A decoder layer whose attention reads normed embedding and hidden state, 2E columns."""

    def __init__(self, spec: ModelSpec, cos_sin_PC: torch.Tensor) -> None:
        super().__init__(spec, 2 * spec.hidden_size, cos_sin_PC)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)  # of the embedding
        self.hidden_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def join(self, embedded_RE: torch.Tensor, hidden_RE: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(embedded_RE), self.hidden_norm(hidden_RE)], dim=1)


class TrainableDraft(nn.Module):
    """A draft network with its authors' names and float32 parameters. It has its own head and
    vocabulary, and the target's embedding."""

    architecture: str
    step_decay: float
    """Weight in the loss of a guess relative to the one before: deeper ones are reached less
    often."""

    def __init__(
        self,
        spec: ModelSpec,
        shared: dict[str, Any],
        features: AuxHiddenStates,
        vocabulary: DraftVocabulary,
        embed: Embed,
    ) -> None:
        """
        Args:
            spec: of its decoder layer.
            shared: further fields of its config.json.
            features: the hidden states of the target that it reads.
            vocabulary: the tokens that it can name.
            embed: the target's embedding.
        """
        super().__init__()
        self.features, self.vocabulary, self.embed = features, vocabulary, embed
        self.spec, self.shared = spec, shared
        hidden = spec.hidden_size
        self.fc = nn.Linear(features.count * hidden, hidden, bias=False)
        self.norm = RmsNorm(hidden, spec.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(vocabulary.token_ids_D), bias=False)

    def config(self) -> dict[str, Any]:
        """The contents of its config.json."""
        raise NotImplementedError

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Logits over the draft's vocabulary, [R, D]."""
        return self.lm_head(self.norm(hidden_RE))

    def anchors_A(self, rows: PackedRows) -> torch.Tensor:
        """Indices of the rows of S that `unroll` guesses from; int64 [A]."""
        raise NotImplementedError

    def unroll(
        self, rows: PackedRows, num_steps: int, anchors_A: torch.Tensor
    ) -> list[torch.Tensor]:
        """Hidden states [A, E] for ``logits`` of each step, assuming that earlier guesses were
        right. ``anchors_A``: from `anchors_A`."""
        raise NotImplementedError

    def read(
        self, tokens_M: torch.Tensor, features_MF: torch.Tensor, positions_M: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Run the rows of a sequence.

        Returns their hidden states [M, E], which give a tree's first level, and what ``deepen``
        needs. ``tokens_M``: for row i, the token that follows features i.
        """
        raise NotImplementedError

    def deepen(
        self,
        level: int,
        memory: Any,
        rows_R: torch.Tensor,
        positions_R: torch.Tensor,
        tokens_R: torch.Tensor,
        hidden_RE: torch.Tensor,
        chain: Chain,
    ) -> tuple[torch.Tensor, Chain]:
        """Run one level of nodes, of trees that grow from rows ``rows_R``.

        Returns the nodes' hidden states, and the chain for their children.

        Args:
            level: the nodes' depth below the first level, from 1 on.
            memory: from ``read``.
            positions_R: positions of the rows.
            tokens_R: the nodes' tokens.
            hidden_RE: their parents' hidden states.
            chain: their parents' chain, [R, ...] each.
        """
        raise NotImplementedError


def published_config(draft: TrainableDraft) -> dict[str, Any]:
    """The fields of config.json that all kinds have."""
    spec = draft.spec
    return draft.shared | {
        "architectures": [draft.architecture],
        "model_type": "llama",
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_size,
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": len(draft.vocabulary.token_ids_D),
        "tie_word_embeddings": False,
    }


class TrainableEagle3(TrainableDraft):
    """EAGLE-3. Its config.json and tensors are those of its authors."""

    architecture = "LlamaForCausalLMEagle3"
    step_decay = 0.8  # the value of its authors

    def __init__(
        self,
        spec: ModelSpec,
        shared: dict[str, Any],
        features: AuxHiddenStates,
        vocabulary: DraftVocabulary,
        embed: Embed,
    ) -> None:
        super().__init__(spec, shared, features, vocabulary, embed)
        cos_sin_PC = cos_sin_table(
            spec.rope, spec.head_dim, spec.max_context_len, torch.device("cpu")
        )
        self.midlayer = MidLayer(spec, cos_sin_PC)

    def config(self) -> dict[str, Any]:
        layers = list(self.features.layers)
        return published_config(self) | {"eagle_aux_hidden_state_layer_ids": layers}

    def anchors_A(self, rows: PackedRows) -> torch.Tensor:
        """All of them."""
        return torch.arange(len(rows.guesses_S), device=rows.guesses_S.device)

    def unroll(
        self, rows: PackedRows, num_steps: int, anchors_A: torch.Tensor
    ) -> list[torch.Tensor]:
        """Each step reads the hidden states of the step before."""
        layer = self.midlayer
        fused_TE = self.fc(rows.features_TF)
        joined_TI = layer.join(self.embed(rows.tokens_T(0)), fused_TE)
        k_TKC, v_TKC = layer.self_attn.keys_values(joined_TI, rows.positions_T)
        residual_SE, joined_SI = fused_TE[rows.guesses_S], joined_TI[rows.guesses_S]
        chain: Chain = []
        hidden: list[torch.Tensor] = []
        for step in range(num_steps):
            positions_S = rows.positions_S + step
            if step:
                residual_SE = hidden[-1]
                joined_SI = layer.join(self.embed(rows.tokens_S(step)), residual_SE)
                chain.append(layer.self_attn.keys_values(joined_SI, positions_S))
            q_SHC = layer.self_attn.queries(joined_SI, positions_S)
            attended = [
                attend(
                    q_SHC[each.guesses],
                    k_TKC[each.rows],
                    v_TKC[each.rows],
                    rows.visible_S[each.guesses],
                    [(k_SKC[each.guesses], v_SKC[each.guesses]) for k_SKC, v_SKC in chain],
                )
                for each in rows.sequences
            ]
            hidden.append(layer.finish(residual_SE, torch.cat(attended)))
        return hidden

    def read(
        self, tokens_M: torch.Tensor, features_MF: torch.Tensor, positions_M: torch.Tensor
    ) -> tuple[torch.Tensor, KeysValues]:
        layer = self.midlayer
        fused_ME = self.fc(features_MF)
        joined_MI = layer.join(self.embed(tokens_M), fused_ME)
        keys_values = layer.self_attn.keys_values(joined_MI, positions_M)
        q_MHC = layer.self_attn.queries(joined_MI, positions_M)
        visible_M = torch.arange(1, len(tokens_M) + 1, device=tokens_M.device)
        attended = attend(q_MHC, *keys_values, visible_M, [])
        return layer.finish(fused_ME, attended), keys_values

    def deepen(
        self,
        level: int,
        memory: KeysValues,
        rows_R: torch.Tensor,
        positions_R: torch.Tensor,
        tokens_R: torch.Tensor,
        hidden_RE: torch.Tensor,
        chain: Chain,
    ) -> tuple[torch.Tensor, Chain]:
        layer = self.midlayer
        joined_RI = layer.join(self.embed(tokens_R), hidden_RE)
        chain = [*chain, layer.self_attn.keys_values(joined_RI, positions_R + level)]
        q_RHC = layer.self_attn.queries(joined_RI, positions_R + level)
        attended = attend(q_RHC, *memory, rows_R + 1, chain)
        return layer.finish(hidden_RE, attended), chain
