"""EAGLE-3 (Li et al. 2025) for training: one decoder layer over three fused hidden states.

Legend: T rows of all sequences, S those that guess, M rows of one sequence, R rows, F feature
columns, E hidden, D draft vocabulary.
"""

from __future__ import annotations

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
from spec_workers.draft_training.draft import Chain, DraftVocabulary, Embed, TrainableDraft
from spec_workers.draft_training.packed_rows import PackedRows


class MidLayer(TrainableDecoderLayer):
    """A decoder layer whose attention reads normed embedding and hidden state, 2E columns."""

    def __init__(self, spec: ModelSpec, cos_sin_PC: torch.Tensor) -> None:
        super().__init__(spec, 2 * spec.hidden_size, cos_sin_PC)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)  # of the embedding
        self.hidden_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)

    def join(self, embedded_RE: torch.Tensor, hidden_RE: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.input_layernorm(embedded_RE), self.hidden_norm(hidden_RE)], dim=1)


class TrainableEagle3(TrainableDraft):
    """EAGLE-3 with its authors' names. It has its own head and vocabulary, and the target's
    embedding."""

    architecture = "LlamaForCausalLMEagle3"
    stored_prefix = ""
    max_steps = None

    def __init__(
        self,
        spec: ModelSpec,
        shared: dict[str, Any],
        features: AuxHiddenStates,
        vocabulary: DraftVocabulary,
        embed: Embed,
    ) -> None:
        super().__init__(spec, shared, features, vocabulary, embed)
        hidden = spec.hidden_size
        cos_sin_PC = cos_sin_table(
            spec.rope, spec.head_dim, spec.max_context_len, torch.device("cpu")
        )
        self.fc = nn.Linear(features.count * hidden, hidden, bias=False)
        self.midlayer = MidLayer(spec, cos_sin_PC)
        self.norm = RmsNorm(hidden, spec.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(vocabulary.token_ids_D), bias=False)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "eagle_aux_hidden_state_layer_ids": list(self.features.layers),
        }

    def tables(self) -> dict[str, torch.Tensor]:
        return super().tables() | {"t2d": self.vocabulary.contains_V}

    def unroll(self, rows: PackedRows, num_steps: int) -> list[torch.Tensor]:
        """The training-time test: each step reads the hidden states of the step before."""
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

    def head_input(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden_RE)

    def read(
        self, tokens_M: torch.Tensor, features_MF: torch.Tensor, positions_M: torch.Tensor
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        layer = self.midlayer
        fused_ME = self.fc(features_MF)
        joined_MI = layer.join(self.embed(tokens_M), fused_ME)
        keys_values = layer.self_attn.keys_values(joined_MI, positions_M)
        q_MHC = layer.self_attn.queries(joined_MI, positions_M)
        visible_M = torch.arange(1, len(tokens_M) + 1, device=tokens_M.device)
        attended = attend(q_MHC, *keys_values, visible_M, [])
        return layer.finish(fused_ME, attended), [keys_values]

    def deepen(
        self,
        level: int,
        memory: list[KeysValues],
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
        attended = attend(q_RHC, *memory[0], rows_R + 1, chain)
        return layer.finish(hidden_RE, attended), chain
