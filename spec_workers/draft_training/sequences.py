"""Training sequences: tokens and the target's features.

Legend: L tokens of a sequence, N = L - 1 rows of features, F feature columns.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollout.errors import InvalidInputError
from rollout.offline.output_rows import job_rows

SHORTEST = 3  # tokens: a row, the token that follows it, and the one to predict


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """A prompt and its continuation, or a part of them."""

    token_ids_L: torch.Tensor  # int64
    # The row of the prompt's last token, where the draft's guesses begin.
    first_root: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt's tokens, as a dictionary key."""
        return tuple(self.token_ids_L[: self.first_root + 1].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """Tokens with features: row i is what the target computed at token i; the last token has none.

    A row attends only to its own sequence: a part from the middle is a sequence of its own.
    """

    tokens: TokenSequence
    features_NF: torch.Tensor  # in the layout of `DraftTrainer.features`
    first_position: int = 0  # of the first token: a part may begin anywhere


def read_rollouts(
    paths: Sequence[Path], vocab_size: int, max_len: int, field: str = "rollouts"
) -> list[TokenSequence]:
    """The rollouts of offline jobs' output files, in file order, cut to ``max_len`` tokens.

    Rollouts too short to train on are left out. Raises InvalidInputError naming ``field`` if a file
    cannot be read, a row lacks its tokens, or a token is outside the vocabulary.
    """
    found: list[TokenSequence] = []
    num_rows = 0
    for path in paths:
        for where, row in job_rows(path, field):
            num_rows += 1
            prompt_ids, token_ids = (_tokens(row, name, where, field) for name in _COLUMNS)
            if not prompt_ids:
                raise InvalidInputError(field, where, "has an empty prompt")
            token_ids = (prompt_ids + token_ids)[:max_len]
            if max(token_ids) >= vocab_size:
                raise InvalidInputError(
                    field,
                    where,
                    f"holds token {max(token_ids)}; the model's vocabulary ends at "
                    f"{vocab_size}: give the model that made the rollouts",
                )
            if len(token_ids) >= max(SHORTEST, len(prompt_ids) + 2):
                ids_L = torch.tensor(token_ids, dtype=torch.int64)
                found.append(TokenSequence(token_ids_L=ids_L, first_root=len(prompt_ids) - 1))
    if not found:
        raise InvalidInputError(
            field,
            ", ".join(map(str, paths)),
            "hold no rollout" + (" of two tokens" if num_rows else ""),
        )
    return found


def split_by_prompt(
    sequences: Sequence[TokenSequence], num_held_out: int, seed: int
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """The sequences to train on, and at least ``num_held_out`` held-out ones: all of some
    prompts."""
    by_prompt: dict[tuple[int, ...], list[TokenSequence]] = {}
    for sequence in sequences:
        by_prompt.setdefault(sequence.prompt, []).append(sequence)
    groups = list(by_prompt.values())
    random.Random(seed).shuffle(groups)
    held_out: list[TokenSequence] = []
    while len(held_out) < num_held_out:
        held_out += groups.pop()
    return [sequence for group in groups for sequence in group], held_out


_COLUMNS = ("prompt_ids", "token_ids")


def _tokens(row: dict[str, Any], column: str, where: str, field: str) -> list[int]:
    tokens = row.get(column)
    if tokens is None:
        raise InvalidInputError(
            field, where, f"has no {column}; the job writes them with output.prompt_ids=true"
        )
    if not isinstance(tokens, list) or any(type(each) is not int or each < 0 for each in tokens):
        raise InvalidInputError(field, where, f"{column} must be a list of token ids")
    return tokens
