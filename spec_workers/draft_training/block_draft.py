"""DFlash (Chen, Liang, Liu 2026) for training: blocks behind random anchors, with frozen context.

Legend: S rows that guess, A anchors among them, B rows of a block, R = A * B rows, M rows of a
sequence, E hidden, F feature columns, L = B - 1 levels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.layers.rope import cos_sin_table
from rollout.models.spec import ModelSpec
from spec_workers.draft_training.decoder_layer import RmsNorm, TrainableDecoderLayer, attend
from spec_workers.draft_training.draft import (
    Chain,
    DraftVocabulary,
    Embed,
    TrainableDraft,
    published_config,
)
from spec_workers.draft_training.packed_rows import PackedRows

_ANCHOR_SHARE = 2  # one row in so many is an anchor: each is as many rows as a block has


class BlockLayer(TrainableDecoderLayer):
    def __init__(self, spec: ModelSpec, cos_sin_PC: torch.Tensor) -> None:
        super().__init__(spec, spec.hidden_size, cos_sin_PC)
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)


class TrainableDFlash(TrainableDraft):
    """DFlash with its authors' names, a head and vocabulary of its own, and the target's
    embedding."""

    architecture = "DFlashDraftModel"
    step_decay = 0.5  # later guesses know nothing of the tokens between

    def __init__(
        self,
        spec: ModelSpec,
        shared: dict[str, Any],
        features: AuxHiddenStates,
        vocabulary: DraftVocabulary,
        embed: Embed,
        *,
        block_size: int,
        mask_token_id: int,
    ) -> None:
        """``spec``: of all its layers. The others: as of `TrainableEagle3`."""
        super().__init__(spec, shared, features, vocabulary, embed)
        self._block_size, self.mask_token_id = block_size, mask_token_id
        hidden = spec.hidden_size
        cos_sin_PC = cos_sin_table(
            spec.rope, spec.head_dim, spec.max_context_len, torch.device("cpu")
        )
        self.hidden_norm = RmsNorm(hidden, spec.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(spec, cos_sin_PC) for _ in range(spec.num_layers))

    def config(self) -> dict[str, Any]:
        own = {
            "target_layer_ids": [layer - 1 for layer in self.features.layers],
            "mask_token_id": self.mask_token_id,
        }
        return published_config(self) | {"block_size": self._block_size, "dflash_config": own}

    def anchors_A(self, rows: PackedRows) -> torch.Tensor:
        """Random rows of S, ascending. The batch alone decides which, so a resumed run draws the
        same."""
        count = len(rows.guesses_S)
        seed = int(rows.tokens_T(0).sum()) + count
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        return order[: -(-count // _ANCHOR_SHARE)].sort().values.to(rows.guesses_S.device)

    def unroll(
        self, rows: PackedRows, num_steps: int, anchors_A: torch.Tensor
    ) -> list[torch.Tensor]:
        """Hidden states [A, E] of each of the block's guesses, whatever ``num_steps`` says: they
        come at once."""
        fused_TE = self.hidden_norm(self.fc(rows.features_TF))
        parts = []
        for each in rows.sequences:
            inside = (anchors_A >= each.guesses.start) & (anchors_A < each.guesses.stop)
            own_A = anchors_A[inside]
            if len(own_A):
                first = int(rows.positions_T[each.rows.start])
                tokens_A = rows.tokens_S(0)[own_A]
                visible_A = rows.visible_S[own_A]
                parts.append(self._blocks(fused_TE[each.rows], first, tokens_A, visible_A))
        return list(torch.cat(parts).unbind(1))

    def read(
        self, tokens_M: torch.Tensor, features_MF: torch.Tensor, positions_M: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        fused_ME = self.hidden_norm(self.fc(features_MF))
        visible_M = torch.arange(1, len(tokens_M) + 1, device=tokens_M.device)
        hidden_MLE = self._blocks(fused_ME, int(positions_M[0]), tokens_M, visible_M)
        return hidden_MLE[:, 0], hidden_MLE

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
        """The block's states of that level, whatever the nodes above are. A level beyond the block
        repeats its last."""
        return memory[rows_R, min(level, memory.shape[1] - 1)], chain

    def _blocks(
        self,
        fused_ME: torch.Tensor,
        first_position: int,
        tokens_A: torch.Tensor,
        visible_A: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states [A, L, E] of blocks that begin with these tokens, each behind the first
        ``visible_A`` rows of one sequence's context."""
        block, count, device = self._block_size, len(tokens_A), tokens_A.device
        ids_AB = torch.full((count, block), self.mask_token_id, device=device)
        ids_AB[:, 0] = tokens_A
        positions_R = first_position + visible_A[:, None] + torch.arange(block, device=device)
        positions_R = positions_R.flatten()
        context_M = first_position + torch.arange(len(fused_ME), device=device)
        visible_R = visible_A.repeat_interleave(block)
        residual_RE = self.embed(ids_AB.flatten()).float()
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            normed_RE, attention = layer.input_layernorm(residual_RE), layer.self_attn
            keys, values = attention.keys_values(normed_RE, positions_R)
            links = [
                (
                    keys[row::block].repeat_interleave(block, dim=0),
                    values[row::block].repeat_interleave(block, dim=0),
                )
                for row in range(block)
            ]
            attended = attend(
                attention.queries(normed_RE, positions_R),
                *attention.keys_values(fused_ME, context_M),
                visible_R,
                links,
            )
            residual_RE = layer.finish(residual_RE, attended)
        return residual_RE.unflatten(0, (count, block))[:, 1:]
