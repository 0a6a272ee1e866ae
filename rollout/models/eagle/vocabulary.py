"""The reduced vocabulary of a draft: which token of the target each of its tokens is.

Legend: D draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import torch

from rollout.errors import CheckpointError


def target_token_ids(
    d2t_D: torch.Tensor, t2d_V: torch.Tensor | None, draft_vocab_size: int, vocab_size: int
) -> torch.Tensor:
    """int64 [D]: the target's token of each draft token, in the checkpoint's order.

    EAGLE's authors, SpecForge and speculators all store ``d2t`` as what is to be added to the draft
    token. ``t2d``, which marks the target's tokens that the draft has, tells where somebody stored
    the tokens themselves.

    Raises CheckpointError where the tables do not make a vocabulary of D distinct tokens.
    """
    if tuple(d2t_D.shape) != (draft_vocab_size,):
        raise CheckpointError(
            f"d2t is {list(d2t_D.shape)}, the draft has {draft_vocab_size} tokens"
        )
    stored_D = d2t_D.long()
    added_D = stored_D + torch.arange(draft_vocab_size)
    if t2d_V is None or draft_vocab_size == vocab_size:
        if _is_vocabulary(added_D, vocab_size):
            return added_D
        raise CheckpointError(
            f"d2t, added to the draft's tokens, gives no {draft_vocab_size} distinct ones of "
            f"the target's {vocab_size}"
        )
    marked = t2d_V.nonzero().flatten()
    for tokens_D in (added_D, stored_D):
        if _is_vocabulary(tokens_D, vocab_size) and torch.equal(tokens_D.sort().values, marked):
            return tokens_D
    raise CheckpointError(
        f"d2t and t2d disagree: t2d marks {len(marked)} of the target's tokens, which d2t gives "
        "neither as differences nor as tokens"
    )


def _is_vocabulary(tokens_D: torch.Tensor, vocab_size: int) -> bool:
    in_range = bool(((tokens_D >= 0) & (tokens_D < vocab_size)).all())
    return in_range and len(tokens_D.unique()) == len(tokens_D)
