"""Accept length on held-out rollouts: tokens that an engine would emit per forward of the target.

At every position of a rollout the draft grows its tree as the engine does, level by level from the
true tokens so far, and the longest path that matches the recorded tokens is counted. The engine's
output does not depend on the draft, so a walk over the recorded tokens in which each step is as
long as its tree matched takes the engine's steps.

Legend: L tokens of a sequence, M = L - 2 rows, R roots, N nodes, W nodes of a root that a level
expands, K candidates of a node, E hidden, D draft vocabulary, F feature columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollout.errors import InvalidInputError
from spec_workers.draft_training.decoder_layer import KeysValues
from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.sequences import TrainingSequence

_ROOTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The shape of draft trees, as in the worker's options."""

    num_steps: int = 4  # levels
    topk: int = 4  # candidates of a node
    num_draft_tokens: int = 8  # nodes of the final tree

    def __post_init__(self) -> None:
        for name in ("num_steps", "topk", "num_draft_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(name, getattr(self, name), "must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutResult:
    """A measurement of a draft on held-out rollouts."""

    accept_length: float  # tokens per forward of the target, the target's own included
    matched: list[float]  # [k - 1]: share of steps whose tree matched at least k tokens
    num_steps: int  # forwards of the target
    num_tokens: int


@torch.inference_mode()
def held_out_accept_length(
    draft: TrainableDraft, sequences: Sequence[TrainingSequence], shape: TreeShape
) -> HeldOutResult:
    """Measure a draft. ``sequences``: with exactly the features that the draft reads."""
    lengths: list[int] = []
    tokens = 0
    for sequence in sequences:
        matched_R = matched_lengths(draft, sequence, shape).tolist()
        position = 0
        tokens += len(matched_R)
        while position < len(matched_R):
            lengths.append(matched_R[position])
            position += matched_R[position] + 1
    if not lengths:
        raise InvalidInputError("held_out", len(sequences), "needs rollouts of two tokens and more")
    steps = len(lengths)
    return HeldOutResult(
        accept_length=tokens / steps,
        matched=[sum(n >= k for n in lengths) / steps for k in range(1, max(lengths) + 1)],
        num_steps=steps,
        num_tokens=tokens,
    )


@torch.inference_mode()
def matched_lengths(
    draft: TrainableDraft, sequence: TrainingSequence, shape: TreeShape
) -> torch.Tensor:
    """The number of recorded tokens that each root's tree matches; int64 [R].

    Roots are the sequence's rows from its first root on.
    """
    device = next(draft.parameters()).device
    token_ids_L = sequence.tokens.token_ids_L.to(device)
    num_rows = len(token_ids_L) - 2
    features_MF = sequence.features_NF[:num_rows].to(device)
    positions_M = sequence.first_position + torch.arange(num_rows, device=device)
    hidden_ME, memory = draft.read(token_ids_L[1:-1], features_MF, positions_M)
    roots = torch.arange(sequence.tokens.first_root, num_rows, device=device)
    parts = [
        _Growth(draft, memory, token_ids_L, sequence.first_position, roots_R, shape).grow(
            hidden_ME[roots_R]
        )
        for roots_R in roots.split(_ROOTS_AT_ONCE)
    ]
    return torch.cat(parts)


class _Growth:
    """Trees of many roots of one sequence, grown together (EAGLE-2, Li et al. 2024)."""

    def __init__(
        self,
        draft: TrainableDraft,
        memory: Any,
        token_ids_L: torch.Tensor,
        first_position: int,
        roots_R: torch.Tensor,
        shape: TreeShape,
    ) -> None:
        self._draft = draft
        self._memory = memory
        self._tokens_L = token_ids_L
        self._token_ids_D = draft.vocabulary.token_ids_D.to(roots_R.device)
        self._first_position = first_position
        self._roots_R = roots_R
        self._shape = shape

    def grow(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Grow the trees from the roots' hidden states. Returns matched tokens, int64 [R]."""
        draft, roots, device = self._draft, len(hidden_RE), self._roots_R.device
        levels = self._shape.num_steps
        scores_RW = torch.zeros(roots, 1, device=device)
        is_true_RW = torch.ones(roots, 1, dtype=torch.bool, device=device)
        chain: list[KeysValues] = []
        level_scores, level_true = [], []
        for level in range(levels):
            scores_RN, tokens_RN = self._candidates(hidden_RE, scores_RW)
            recorded_R1 = self._recorded_tokens(level)
            width = tokens_RN.shape[1] // is_true_RW.shape[1]
            is_true_RN = is_true_RW.repeat_interleave(width, dim=1) & (tokens_RN == recorded_R1)
            level_scores.append(scores_RN)
            level_true.append(is_true_RN)
            if level == levels - 1:
                break
            best_RW = scores_RN.topk(min(self._shape.topk, scores_RN.shape[1])).indices
            scores_RW = scores_RN.gather(1, best_RW)
            is_true_RW = is_true_RN.gather(1, best_RW)
            first_R1 = torch.arange(roots, device=device)[:, None] * (scores_RN.shape[1] // width)
            parents = (first_R1 + best_RW // width).flatten()
            rows = self._roots_R.repeat_interleave(best_RW.shape[1])
            hidden_RE, chain = draft.deepen(
                level + 1,
                self._memory,
                rows,
                self._first_position + rows,
                tokens_RN.gather(1, best_RW).flatten(),
                hidden_RE[parents],
                [(keys[parents], values[parents]) for keys, values in chain],
            )
        scores_RN, is_true_RN = torch.cat(level_scores, dim=1), torch.cat(level_true, dim=1)
        # A child's score is never above its parent's, so the best nodes include their ancestors.
        best_RN = scores_RN.topk(min(self._shape.num_draft_tokens, scores_RN.shape[1])).indices
        return is_true_RN.gather(1, best_RN).sum(1)

    def _candidates(
        self, hidden: torch.Tensor, scores_RW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Path log probabilities and target tokens [R, W * K] of the nodes' most likely
        children."""
        logprobs = self._draft.logits(hidden).float().log_softmax(-1)
        best = logprobs.topk(min(self._shape.topk, logprobs.shape[-1]))
        scores_RN = (best.values.unflatten(0, scores_RW.shape) + scores_RW[..., None]).flatten(1)
        tokens = self._token_ids_D[best.indices]
        return scores_RN, tokens.unflatten(0, scores_RW.shape).flatten(1)

    def _recorded_tokens(self, level: int) -> torch.Tensor:
        """The recorded tokens at a level, [R, 1]; -1 past the end."""
        at_R = self._roots_R + 2 + level
        inside_R = at_R < len(self._tokens_L)
        tokens_R = self._tokens_L[at_R.clamp(max=len(self._tokens_L) - 1)]
        return torch.where(inside_R, tokens_R, -1)[:, None]
