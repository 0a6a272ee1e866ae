"""Sequences packed into flat rows for one training pass.

Row i of a sequence joins features i with token i + 1 and guesses token i + 2. A sequence of L
tokens has M = L - 2 such rows, so each guess can be compared with the target's prediction and with
the recorded token.

Legend: T rows of all sequences, S those among them that guess (of each sequence the rows from its
first root on), L tokens of a sequence, F feature columns, E hidden.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rollout.models.aux_hidden_states import AuxHiddenStates
from spec_workers.draft_training.sequences import TrainingSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """The slices that a sequence's rows occupy."""

    rows: slice  # of T
    guesses: slice  # of S: its last rows

    @property
    def num_rows(self) -> int:
        """All rows of the sequence."""
        return self.rows.stop - self.rows.start

    @property
    def num_guesses(self) -> int:
        """Rows of the sequence that guess."""
        return self.guesses.stop - self.guesses.start


class PackedRows:
    """The packed rows of several sequences. Guesses of step s are s tokens further on than rows."""

    def __init__(
        self,
        sequences: Sequence[TrainingSequence],
        features: AuxHiddenStates,
        wanted: AuxHiddenStates,
        device: torch.device,
    ) -> None:
        """``features``: the sequences' layout. ``wanted``: the features that the draft reads."""
        final = AuxHiddenStates(final=True)
        tokens, inputs, finals, positions, index, visible = [], [], [], [], [], []
        self.sequences: list[PackedSequence] = []
        rows = guesses = 0
        for sequence in sequences:
            token_ids_L = sequence.tokens.token_ids_L
            num_rows = len(token_ids_L) - 2
            num_guesses = num_rows - sequence.tokens.first_root
            assert num_guesses > 0, "a sequence without guesses"
            tokens.append(token_ids_L)
            inputs.append(features.select(sequence.features_NF[:num_rows], wanted))
            finals.append(features.select(sequence.features_NF[1:], final))
            visible.append(torch.arange(1, num_rows + 1))
            positions.append(sequence.first_position + torch.arange(num_rows))
            index.append(torch.arange(rows + num_rows - num_guesses, rows + num_rows))
            packed = PackedSequence(
                rows=slice(rows, rows + num_rows), guesses=slice(guesses, guesses + num_guesses)
            )
            self.sequences.append(packed)
            rows, guesses = packed.rows.stop, packed.guesses.stop
        self._tokens = tokens
        self._device = device
        self.features_TF = torch.cat(inputs).to(device)
        self.positions_T = torch.cat(positions).to(device)
        self.guesses_S = torch.cat(index).to(device)  # indices of the rows that guess, in T
        self.visible_T = torch.cat(visible).to(
            device
        )  # number of its sequence's rows that a row sees
        self.visible_S = self.visible_T[self.guesses_S]
        self.positions_S = self.positions_T[self.guesses_S]
        self._final_TE = torch.cat(finals).to(device)  # row i: the target's state at token i + 1

    def tokens_T(self, step: int) -> torch.Tensor:
        """The input tokens of a step: token i + 1 + step for row i; token 0 past the end."""
        return self._shifted(1 + step)

    def tokens_S(self, step: int) -> torch.Tensor:
        """The input tokens of a step for the rows that guess."""
        return self.tokens_T(step)[self.guesses_S]

    def guessed_tokens_S(self, step: int) -> torch.Tensor:
        """The recorded tokens that a step guesses; token 0 past the end."""
        return self._shifted(2 + step)[self.guesses_S]

    def is_inside_S(self, step: int) -> torch.Tensor:
        """Whether a step's guesses are of recorded tokens, and not past the end; bool [S]."""
        remaining = [torch.arange(each.num_guesses - 1, -1, -1) for each in self.sequences]
        return torch.cat(remaining).to(self._device) >= step

    def final_SE(self) -> torch.Tensor:
        """The target's final state at each guess's input token of step 0; its head gives labels."""
        return self._final_TE[self.guesses_S]

    def label_rows_S(self, step: int) -> torch.Tensor:
        """Indices of the rows of ``final_SE`` that predict the tokens of the step's guesses.

        For guesses past the end, the sequence's last row.
        """
        rows = [
            torch.arange(each.guesses.start, each.guesses.stop)
            .add_(step)
            .clamp_(max=each.guesses.stop - 1)
            for each in self.sequences
        ]
        return torch.cat(rows).to(self._device)

    def _shifted(self, shift: int) -> torch.Tensor:
        shifted = []
        for token_ids_L, packed in zip(self._tokens, self.sequences, strict=True):
            taken = token_ids_L[shift : shift + packed.num_rows]
            missing = packed.num_rows - len(taken)
            shifted.append(torch.nn.functional.pad(taken, (0, missing)))
        return torch.cat(shifted).to(self._device)


class BatchOrder:
    """Random batches of at least ``batch_guesses`` guesses; an epoch's last may have fewer."""

    def __init__(self, num_guesses: Sequence[int], batch_guesses: int, seed: int) -> None:
        """``num_guesses``: of each sequence."""
        self._num_guesses = num_guesses
        self._batch_guesses = batch_guesses
        self._seed = seed
        self.epoch = 0
        self.position = 0  # sequences of the epoch that were in a batch

    def next(self) -> list[int]:
        """Indices of the next batch's sequences."""
        order = list(range(len(self._num_guesses)))
        random.Random(f"{self._seed} {self.epoch}").shuffle(order)
        batch: list[int] = []
        guesses = 0
        while guesses < self._batch_guesses and self.position < len(order):
            batch.append(order[self.position])
            guesses += self._num_guesses[batch[-1]]
            self.position += 1
        if self.position == len(order):
            self.epoch, self.position = self.epoch + 1, 0
        return batch

    def skip_to(self, epoch: int, position: int) -> None:
        """Continue at a position that an earlier run reached."""
        self.epoch, self.position = epoch, position
