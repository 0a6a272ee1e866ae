"""Initial weights of a block draft's first layer: attention that brings what EAGLE drafts get.

A mask token knows of the text by attention alone. Random attention takes long to find what tells
most of the next token: the target's hidden state one token back, and the last token itself, which
begins the block. So the first layer begins as two copies. Seen from the first mask, most heads read
the context's last row, two positions back, and the others the block's first, one back. Each copies
the coordinates in which such rows differ most.

Legend: N rows, E hidden, C channels of a head, c half of them.
"""

from __future__ import annotations

import torch

from spec_workers.draft_training.block_draft import BlockLayer, TrainableDFlash

_CONTEXT_SHARE = 2 / 3  # of the heads
_FREQUENCIES = 8  # of rotary positions, the highest: the others hardly tell neighbours apart
_SHARPNESS = 35.0  # score of each, before scaling: neighbouring positions get a tenth of the weight
_TOKEN_SCALE = 0.5  # of copied embeddings, relative to copied hidden states
_MLP_SCALE = 0.05  # of the target's MLP, which would blur the copies
_RIDGE = 1e-2


@torch.no_grad()
def begin_with_copies(
    draft: TrainableDFlash, token_ids_N: torch.Tensor, features_NF: torch.Tensor
) -> None:
    """Overwrite the attention of the first layer.

    Args:
        token_ids_N: of some text, some thousand.
        features_NF: of these tokens, as the draft reads them.
    """
    layer = draft.layers[0]
    assert isinstance(layer, BlockLayer)
    attention, width = layer.self_attn, layer.self_attn.head_dim
    num_heads = len(attention.q_proj.weight) // width
    assert isinstance(attention.cos_sin_PC, torch.Tensor)
    num_context = round(_CONTEXT_SHARE * num_heads)

    fused_NE = draft.fc(features_NF.float())
    scale = fused_NE.square().mean(1).sqrt().median()  # of hidden states, which were normed
    context_NE = draft.hidden_norm(fused_NE)
    tokens_NE = layer.input_layernorm(draft.embed(token_ids_N).float())
    mask_id = torch.tensor([draft.mask_token_id], device=tokens_NE.device)
    mask_E = layer.input_layernorm(draft.embed(mask_id).float())[0]
    parts = (
        (range(num_context), context_NE, draft.hidden_norm.weight, 2, scale),
        (range(num_context, num_heads), tokens_NE, torch.ones_like(mask_E), 1,
         _TOKEN_SCALE * scale / tokens_NE.square().mean().sqrt()),
    )  # fmt: skip
    for heads, rows_NE, factors_E, distance, size in parts:
        inverse_E = torch.where(factors_E == 0, 0, 1 / factors_E)
        main_XE = _main_coordinates(rows_NE * inverse_E, len(heads) * width)
        copied = slice(heads.start * width, heads.start * width + len(main_XE))
        attention.v_proj.weight[copied] = main_XE * inverse_E
        attention.o_proj.weight[:, copied] = size * main_XE.T
        channels, repeats = slice(heads.start * width, heads.stop * width), (len(heads), 1)
        key_C1, query_C1 = (each[:, None] for each in _position(attention.cos_sin_PC, distance))
        constant_E, to_mask_E = _constant(rows_NE), mask_E / mask_E.square().sum()
        attention.k_proj.weight[channels] = (key_C1 * constant_E).repeat(repeats)
        attention.q_proj.weight[channels] = (query_C1 * to_mask_E).repeat(repeats)
    layer.mlp.down_proj.weight *= _MLP_SCALE


def _main_coordinates(rows_NE: torch.Tensor, most: int) -> torch.Tensor:
    """Orthonormal directions [X, E] along which the rows are largest, at most ``most``."""
    return torch.linalg.eigh(rows_NE.T @ rows_NE).eigenvectors.flip(1)[:, :most].T


def _position(cos_sin_PC: torch.Tensor, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A key and a query [C], before rotation, whose score is highest at this distance."""
    cos_c, sin_c = cos_sin_PC[distance].chunk(2)
    key_c = torch.zeros_like(cos_c)
    key_c[:_FREQUENCIES] = _SHARPNESS**0.5
    key_C = torch.cat([key_c, torch.zeros_like(key_c)])
    return key_C, torch.cat([key_c * cos_c, -key_c * sin_c])


def _constant(rows_NE: torch.Tensor) -> torch.Tensor:
    """A direction [E] along which the rows are nearly 1, as far as one exists."""
    squares_EE = rows_NE.T @ rows_NE / len(rows_NE)
    squares_EE.diagonal().add_(_RIDGE * squares_EE.diagonal().mean())
    return torch.linalg.solve(squares_EE, rows_NE.mean(0))
