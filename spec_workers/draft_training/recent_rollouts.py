"""The newest rollouts of a feature ring, for training and judging a draft.

Legend: L tokens of a sequence, N rows of features, F feature columns.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch

from spec_workers.draft_training.config import CoTrainingConfig
from spec_workers.draft_training.sequences import SHORTEST, TokenSequence, TrainingSequence
from spec_workers.features.feature_ring import FeatureRing, FeatureSequence

_DONORS = 64
"""Newest sequences that are searched for the features of a cached prefix."""

_SHARE = 0.25
"""The largest share of the memory for held-out sequences, and the same for donors."""


class RecentRollouts:
    """Reads the ring and holds the newest sequences; some prompts are held out.

    A prompt's tokens alone decide whether it is held out, so none of its samples is ever trained
    on, also after a restart. Features of a cached prefix come from the donor: the sequence for
    which the target computed them, if it was recorded. By row invariance they are the same, bit for
    bit.
    """

    def __init__(self, ring: FeatureRing, config: CoTrainingConfig) -> None:
        self._ring = ring
        self._next = 0  # number of the sequence to read next
        self._config = config
        self._donors: deque[FeatureSequence] = deque(maxlen=_DONORS)
        self.features = ring.features
        self.training: deque[TrainingSequence] = deque()
        self.held_out: deque[TrainingSequence] = deque(maxlen=config.max_held_out)
        self.num_taken = 0  # sequences read in total
        self.num_rows = 0  # rows read for training in total
        self.newest_version = 0  # newest version of the target's weights among all sequences read

    def refresh(self) -> int:
        """Read the sequences that came since the last call. Returns their number."""
        came = self._read()
        # Samples end in any order; the one that computed the prompt may be the last.
        self._donors.extend(each for each in came if not each.first_position)
        for sequence in came:
            self._add(self._completed(sequence))
        self.num_taken += len(came)
        max_bytes = self._config.max_bytes
        for held in (self._donors, self.held_out):
            _drop_oldest(held, int(_SHARE * max_bytes))
        _drop_oldest(
            self.training, max_bytes - _num_bytes(self._donors) - _num_bytes(self.held_out)
        )
        return len(came)

    def skip(self) -> None:
        """Drop the sequences that came since the last call, for example after an evaluation."""
        self._read()

    def _read(self) -> list[FeatureSequence]:
        came = self._ring.read(self._next)
        if came:
            self._next = came[-1].number + 1
        return came

    def _add(self, sequence: FeatureSequence) -> None:
        self.newest_version = max(self.newest_version, sequence.weight_version)
        parts = training_sequences(sequence, self._config.max_len)
        if self._is_held_out(sequence):
            self.held_out.extend(parts)
            return
        for part in parts:
            self.training.append(part)
            self.num_rows += len(part.features_NF)

    def _is_held_out(self, sequence: FeatureSequence) -> bool:
        prompt = sequence.token_ids_L[: sequence.prompt_len].numpy().tobytes()
        return zlib.crc32(prompt) % self._config.held_out_every == 0

    def _completed(self, sequence: FeatureSequence) -> FeatureSequence:
        """The sequence with a donor's features of its cached prefix, if there is a donor."""
        missing = sequence.first_position
        prefix = sequence.token_ids_L[:missing]
        for donor in reversed(self._donors) if missing else ():
            if (
                donor.weight_version == sequence.weight_version
                and len(donor.features_NF) >= missing
                and torch.equal(donor.token_ids_L[:missing], prefix)
            ):
                features_NF = torch.cat([donor.features_NF[:missing], sequence.features_NF])
                return replace(sequence, first_position=0, features_NF=features_NF)
        return sequence


_Sequences = deque[TrainingSequence] | deque[FeatureSequence]


def _num_bytes(sequences: _Sequences) -> int:
    return sum(each.features_NF.nbytes for each in sequences)


def _drop_oldest(sequences: _Sequences, max_bytes: int) -> None:
    num_bytes = _num_bytes(sequences)
    while num_bytes > max_bytes:
        num_bytes -= sequences.popleft().features_NF.nbytes


def training_sequences(sequence: FeatureSequence, max_len: int) -> Iterable[TrainingSequence]:
    """The sequence in parts of at most ``max_len`` tokens that contain something to guess.

    Consecutive parts share one token: a row of features needs the token that follows it.
    """
    first, rows = sequence.first_position, len(sequence.features_NF)
    known = sequence.token_ids_L[first : first + rows + 1]
    for begin in range(0, len(known), max_len - 1):
        tokens = known[begin : begin + max_len]
        first_root = max(0, sequence.prompt_len - 1 - first - begin)
        if len(tokens) >= max(SHORTEST, first_root + SHORTEST):
            yield TrainingSequence(
                tokens=TokenSequence(token_ids_L=tokens, first_root=first_root),
                features_NF=sequence.features_NF[begin : begin + len(tokens) - 1],
                first_position=first + begin,
            )
