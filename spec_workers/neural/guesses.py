"""What a draft guesses behind each node, and what it learns from how that turned out.

Legend: G trees, R rows of logits, D draft vocabulary, C candidates, W children, K components.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.types import Batch, EntryResult
from spec_workers.neural.mixture import CONTEXTS, LearnedMixture
from spec_workers.neural.reliability import Reliability
from spec_workers.neural.shared_noise import SharedNoise
from spec_workers.neural.tree_growth import Expansion

_CANDIDATES = 32
"""Of a row's tokens; those beyond are hardly ever worth a node."""


@dataclass(slots=True)
class _Guessed:
    """Rows of one call."""

    contexts_R: NDArray[np.int64]
    components_RCK: NDArray[np.float32]
    tokens_RC: NDArray[np.int64]
    estimates_RC: NDArray[np.float32]  # by the mixture


@dataclass(slots=True)
class Guesses:
    """The guesses of one step."""

    batch: Batch
    entries_G: list[int]  # of the batch: where trees grow
    noise: SharedNoise
    ends_G: NDArray[np.int64]
    guessed: list[_Guessed] = field(default_factory=list)
    levels: list[Expansion] = field(default_factory=list)  # all but the roots

    def rows_below(self) -> dict[tuple[int, int], int]:
        """(Row of a node, token of a child that was run too) -> the child's row."""
        found: dict[tuple[int, int], int] = {}
        above, first = 0, len(self.entries_G)
        for level in self.levels:
            parents = (above + level.parent_rows_F).tolist()
            keys = zip(parents, level.tokens_F.tolist(), strict=True)
            found.update(zip(keys, range(first, first + len(parents)), strict=True))
            above, first = first, first + len(parents)
        return found


class Guesser:
    """Turns logits into children and their probabilities."""

    def __init__(self, topk: int, token_ids_D: torch.Tensor | None) -> None:
        """
        Args:
            topk: most children of a node.
            token_ids_D: the target's token of each of the draft's; None: the same.
        """
        self._topk = topk
        self._token_ids_D = token_ids_D
        self._mixture = LearnedMixture()
        self._reliability = Reliability(CONTEXTS)
        self._last: Guesses | None = None

    def begin(self, batch: Batch, entries_G: list[int]) -> Guesses:
        entries = [batch.entries[b] for b in entries_G]
        self._last = Guesses(
            batch=batch,
            entries_G=entries_G,
            noise=SharedNoise([entry.request for entry in entries]),
            ends_G=np.array([entry.end for entry in entries], dtype=np.int64),
        )
        return self._last

    @torch.inference_mode()
    def children(
        self,
        guesses: Guesses,
        logits_RD: torch.Tensor,
        trees_R: NDArray[np.int64],
        depths_R: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and probabilities [R, W] of the nodes' children, the most probable first.

        ``depths_R``: of the nodes, 0 for roots.
        """
        positions_R = guesses.ends_G[trees_R] + depths_R
        found = guesses.noise.candidates(logits_RD, trees_R, positions_R, _CANDIDATES)
        index_RC = found.index_RC
        tokens_RC = (index_RC if self._token_ids_D is None else self._token_ids_D[index_RC]).cpu()
        components_RCK = found.components()
        highest_R = found.probs_RC.max(axis=1)
        contexts_R = self._mixture.contexts(found.is_greedy_R, depths_R, highest_R)
        estimates_RC = self._mixture.probabilities(contexts_R, components_RCK)
        probs_RC = self._reliability.corrected(contexts_R, estimates_RC)
        guesses.guessed.append(
            _Guessed(contexts_R, components_RCK, tokens_RC.numpy(), estimates_RC)
        )
        best_RW = np.argsort(-probs_RC, axis=1)[:, : self._topk]
        tokens_RW = np.take_along_axis(tokens_RC.numpy(), best_RW, axis=1)
        return tokens_RW, np.take_along_axis(probs_RC, best_RW, axis=1)

    def learn(self, batch: Batch, results: list[EntryResult]) -> None:
        """From the tokens emitted: along their path as far as there were guesses."""
        guesses, self._last = self._last, None
        if guesses is None or guesses.batch is not batch:
            return
        rows_below = guesses.rows_below()
        rows: list[int] = []
        tokens: list[int] = []
        for tree, b in enumerate(guesses.entries_G):
            row: int | None = tree
            for token in results[b].token_ids:
                if row is None:
                    break
                rows.append(row)
                tokens.append(token)
                row = rows_below.get((row, token))
        if not rows:
            return
        contexts = np.concatenate([each.contexts_R for each in guesses.guessed])
        components = np.concatenate([each.components_RCK for each in guesses.guessed])
        guessed = np.concatenate([each.tokens_RC for each in guesses.guessed])
        estimates = np.concatenate([each.estimates_RC for each in guesses.guessed])
        came_true = guessed[rows] == np.array(tokens)[:, None]
        # The same token may come twice, once with probability 0.
        came_true &= components[rows].any(axis=2)
        self._mixture.learn(contexts[rows], components[rows], came_true)
        self._reliability.learn(contexts[rows], estimates[rows], came_true)
