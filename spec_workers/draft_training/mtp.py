"""A chain of multi-token prediction steps (DeepSeek-V3, 2024) for training: a decoder layer each.

Step k joins the hidden state of token i with token i + k + 1 and guesses token i + k + 2. The first
step reads the target's final hidden state, each later step the states of the step before.

Legend: T rows of all sequences, S those that guess, M rows of one sequence, R rows, E hidden, D
draft vocabulary.
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


class TrainableMtpStep(TrainableDecoderLayer):
    """One step of the chain."""

    def __init__(self, spec: ModelSpec, cos_sin_PC: torch.Tensor) -> None:
        super().__init__(spec, spec.hidden_size, cos_sin_PC)
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.enorm = RmsNorm(hidden, eps)  # of the embedding
        self.hnorm = RmsNorm(hidden, eps)  # of the hidden state
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.norm = RmsNorm(hidden, eps)  # of the output

    def join(self, embedded_RE: torch.Tensor, hidden_RE: torch.Tensor) -> torch.Tensor:
        """The residual stream that enters the layer."""
        return self.eh_proj(torch.cat([self.enorm(embedded_RE), self.hnorm(hidden_RE)], dim=1))

    def leave(self, residual_RE: torch.Tensor, attended_RX: torch.Tensor) -> torch.Tensor:
        """The normed output of the step, [R, E]."""
        return self.norm(self.finish(residual_RE, attended_RX))


class TrainableMtpChain(TrainableDraft):
    """A chain with one head for all steps and the target's embedding."""

    architecture = "SpecrolloutMTP"
    stored_prefix = "draft."

    def __init__(
        self,
        spec: ModelSpec,
        shared: dict[str, Any],
        num_steps: int,
        vocabulary: DraftVocabulary,
        embed: Embed,
    ) -> None:
        super().__init__(spec, shared, AuxHiddenStates(final=True), vocabulary, embed)
        self.max_steps = num_steps
        cos_sin_PC = cos_sin_table(
            spec.rope, spec.head_dim, spec.max_context_len, torch.device("cpu")
        )
        self.layers = nn.ModuleList(TrainableMtpStep(spec, cos_sin_PC) for _ in range(num_steps))
        self.lm_head = nn.Linear(spec.hidden_size, len(vocabulary.token_ids_D), bias=False)

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "model_type": "specrollout_mtp",
            "num_hidden_layers": len(self.layers),
            "num_nextn_predict_layers": len(self.layers),
        }

    def unroll(self, rows: PackedRows, num_steps: int) -> list[torch.Tensor]:
        """Run every step over all rows, since its later rows attend to its prompts."""
        hidden_TE = rows.features_TF
        hidden: list[torch.Tensor] = []
        for step in range(num_steps):
            hidden_TE = self._pass(step, rows, hidden_TE)
            hidden.append(hidden_TE[rows.guesses_S])
        return hidden

    def _pass(self, step: int, rows: PackedRows, hidden_TE: torch.Tensor) -> torch.Tensor:
        layer = self._step(step)
        residual_TE = layer.join(self.embed(rows.tokens_T(step)), hidden_TE)
        normed_TE = layer.input_layernorm(residual_TE)
        k_TKC, v_TKC = layer.self_attn.keys_values(normed_TE, rows.positions_T)
        q_THC = layer.self_attn.queries(normed_TE, rows.positions_T)
        attended = [
            attend(
                q_THC[each.rows],
                k_TKC[each.rows],
                v_TKC[each.rows],
                rows.visible_T[each.rows],
                [],
            )
            for each in rows.sequences
        ]
        return layer.leave(residual_TE, torch.cat(attended))

    def head_input(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return hidden_RE

    def read(
        self, tokens_M: torch.Tensor, features_MF: torch.Tensor, positions_M: torch.Tensor
    ) -> tuple[torch.Tensor, list[KeysValues]]:
        """Run every step over the true tokens. Step k's last k rows have no token yet, and no tree
        reads them."""
        first_ME = hidden_ME = features_MF
        memory: list[KeysValues] = []
        visible_M = torch.arange(1, len(tokens_M) + 1, device=tokens_M.device)
        for step in range(len(self.layers)):
            layer = self._step(step)
            tokens_M = tokens_M if step == 0 else nn.functional.pad(tokens_M[1:], (0, 1))
            residual_ME = layer.join(self.embed(tokens_M), hidden_ME)
            normed_ME = layer.input_layernorm(residual_ME)
            memory.append(layer.self_attn.keys_values(normed_ME, positions_M))
            q_MHC = layer.self_attn.queries(normed_ME, positions_M)
            attended = attend(q_MHC, *memory[-1], visible_M, [])
            hidden_ME = layer.leave(residual_ME, attended)
            first_ME = hidden_ME if step == 0 else first_ME
        return first_ME, memory

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
        """Run the level's own step, which attends to the rows that it read, not to ancestors."""
        layer = self._step(level)
        residual_RE = layer.join(self.embed(tokens_R), hidden_RE)
        normed_RE = layer.input_layernorm(residual_RE)
        own = layer.self_attn.keys_values(normed_RE, positions_R)
        q_RHC = layer.self_attn.queries(normed_RE, positions_R)
        attended = attend(q_RHC, *memory[level], rows_R, [own])
        return layer.leave(residual_RE, attended), []

    def steps(self) -> list[TrainableMtpStep]:
        """The steps in order."""
        return [self._step(step) for step in range(len(self.layers))]

    def _step(self, step: int) -> TrainableMtpStep:
        layer = self.layers[step]
        assert isinstance(layer, TrainableMtpStep)
        return layer
