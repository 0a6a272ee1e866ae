"""The order in which sequences are trained on: shuffled in each epoch, a function of the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence


class BatchOrder:
    """Batches of at least so many guesses; an epoch's last may have fewer."""

    def __init__(self, num_guesses: Sequence[int], batch_guesses: int, seed: int) -> None:
        """``num_guesses``: of each sequence."""
        self._num_guesses = num_guesses
        self._batch_guesses = batch_guesses
        self._seed = seed
        self.epoch = 0
        self.position = 0  # sequences of the epoch that were given out

    def next(self) -> list[int]:
        """Indices of sequences."""
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
        self.epoch, self.position = epoch, position
