"""The newest rollouts of a feature ring, to train a draft on and to judge it by.

Legend: L tokens of a sequence, N rows of features, F feature columns.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import torch

from spec_workers.draft_training.co_training_config import CoTrainingConfig
from spec_workers.draft_training.sequences import SHORTEST, TokenSequence, TrainingSequence
from spec_workers.features.feature_ring import FeatureReader, FeatureSequence

_DONORS = 64
"""Sequences that are looked through for the features of a cached prefix, the newest ones."""

_SHARE = 0.25
"""Of the memory: the most that held-out stretches take, and donors likewise."""


class RecentRollouts:
    """Takes what comes through the ring and keeps the newest, one prompt in some held out.

    Whether a prompt is held out depends on its tokens alone: none of its samples is ever trained
    on, here or after a restart. The features of a prefix that the target found in its cache are
    taken from the sequence for which it computed them, where that was recorded too: by row
    invariance they are the same, bit for bit.
    """

    def __init__(self, reader: FeatureReader, config: CoTrainingConfig) -> None:
        self._reader = reader
        self._config = config
        self._donors: deque[FeatureSequence] = deque(maxlen=_DONORS)
        self.features = reader.features
        self.training: deque[TrainingSequence] = deque()
        self.held_out: deque[TrainingSequence] = deque(maxlen=config.max_held_out)
        self.num_taken = 0  # sequences, ever
        self.num_rows = 0  # that came to be trained on, ever
        self.newest_version = 0  # of the target's weights, among what came

    @property
    def num_missed(self) -> int:
        """Sequences that were overwritten before they were taken."""
        return self._reader.num_missed

    @property
    def num_bytes(self) -> int:
        """The most bytes of kept features. A donor that is trained on too counts twice."""
        return _num_bytes(self.training) + _num_bytes(self.held_out) + _num_bytes(self._donors)

    def refresh(self) -> int:
        """Take what came since. Returns how many sequences that was."""
        came = self._reader.take()
        # Siblings end in any order, and the one that computed the prompt may be the last.
        self._donors.extend(each for each in came if not each.first_position)
        for sequence in came:
            self._add(self._completed(sequence))
        self.num_taken += len(came)
        most = self._config.max_bytes
        for kept in (self._donors, self.held_out):
            _keep_newest(kept, int(_SHARE * most))
        _keep_newest(self.training, most - _num_bytes(self._donors) - _num_bytes(self.held_out))
        return len(came)

    def skip(self) -> None:
        """Leave out what came so far, as after an evaluation: it is not to be trained on."""
        self._reader.take()

    def _add(self, sequence: FeatureSequence) -> None:
        self.newest_version = max(self.newest_version, sequence.weight_version)
        stretches = training_sequences(sequence, self._config.max_len)
        if self._is_held_out(sequence):
            self.held_out.extend(stretches)
            return
        for stretch in stretches:
            self.training.append(stretch)
            self.num_rows += len(stretch.features_NF)

    def _is_held_out(self, sequence: FeatureSequence) -> bool:
        prompt = sequence.token_ids_L[: sequence.prompt_len].numpy().tobytes()
        return zlib.crc32(prompt) % self._config.held_out_every == 0

    def _completed(self, sequence: FeatureSequence) -> FeatureSequence:
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


_Kept = deque[TrainingSequence] | deque[FeatureSequence]


def _num_bytes(kept: _Kept) -> int:
    return sum(each.features_NF.nbytes for each in kept)


def _keep_newest(kept: _Kept, max_bytes: int) -> None:
    num_bytes = _num_bytes(kept)
    while num_bytes > max_bytes:
        num_bytes -= kept.popleft().features_NF.nbytes


def training_sequences(sequence: FeatureSequence, max_len: int) -> Iterable[TrainingSequence]:
    """Stretches of at most ``max_len`` tokens in which there is something to guess.

    Each begins where its features do, and in the one before the last row of which it needs no
    successor: a row of features is of use where the token behind it is known.
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
