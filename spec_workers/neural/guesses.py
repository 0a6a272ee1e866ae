"""The guesses of a draft behind each node, and what it learns from how they turned out.

Legend: G trees, R rows of logits, D draft vocabulary, C candidates, W children, K components.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.runner.transfers import download
from rollout.types import Batch, EntryResult
from spec_workers.neural.mixture import CONTEXTS, LearnedMixture, Reliability
from spec_workers.neural.shared_noise import CANDIDATES, Candidates, SharedNoise
from spec_workers.neural.tree_growth import Expansion

_STEPS_AT_ONCE = 2
"""That may be under way: guesses of older ones are not waited for."""


@dataclass(slots=True, eq=False)
class Cases:
    """Guesses of some rows, as the mixture and the reliability learn from them."""

    contexts_R: NDArray[np.int64]
    components_RCK: NDArray[np.float32]
    tokens_RC: NDArray[np.int64]
    estimates_RC: NDArray[np.float32]  # by the mixture

    @staticmethod
    def joined(parts: Sequence[Cases]) -> Cases:
        return Cases(
            np.concatenate([each.contexts_R for each in parts]),
            np.concatenate([each.components_RCK for each in parts]),
            np.concatenate([each.tokens_RC for each in parts]),
            np.concatenate([each.estimates_RC for each in parts]),
        )

    def of_rows(self, rows: list[int]) -> Cases:
        return Cases(
            self.contexts_R[rows],
            self.components_RCK[rows],
            self.tokens_RC[rows],
            self.estimates_RC[rows],
        )


class Guesses(Protocol):
    """The guesses of one step."""

    @property
    def batch(self) -> Batch: ...

    def followed(self, results: list[EntryResult]) -> tuple[Cases, list[int]] | None:
        """The nodes along the path of the tokens emitted, and at each the token that came; None:
        there were none."""
        ...


@dataclass(slots=True, eq=False)
class HostGuesses:
    """Guesses made level by level."""

    batch: Batch
    entries_G: list[int]  # of the batch: where trees grow
    noise: SharedNoise
    ends_G: NDArray[np.int64]
    guessed: list[Cases] = field(default_factory=list)
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

    def followed(self, results: list[EntryResult]) -> tuple[Cases, list[int]] | None:
        rows_below = self.rows_below()
        rows: list[int] = []
        tokens: list[int] = []
        for tree, b in enumerate(self.entries_G):
            row: int | None = tree
            for token in results[b].token_ids:
                if row is None:
                    break
                rows.append(row)
                tokens.append(token)
                row = rows_below.get((row, token))
        return (Cases.joined(self.guessed).of_rows(rows), tokens) if rows else None


class Guesser:
    """Turns logits into children and their probabilities."""

    def __init__(self, topk: int, token_ids_D: torch.Tensor | None) -> None:
        """
        Args:
            topk: most children of a node.
            token_ids_D: the target's token of each of the draft's; None: the same.
        """
        self._topk = topk
        self.token_ids_D = token_ids_D
        self._token_ids_D = None if token_ids_D is None else download({"ids": token_ids_D})["ids"]
        self._mixture = LearnedMixture()
        self._reliability = Reliability(CONTEXTS)
        self._open: deque[Guesses] = deque(maxlen=_STEPS_AT_ONCE)

    def begin(self, batch: Batch, entries_G: list[int]) -> HostGuesses:
        entries = [batch.entries[b] for b in entries_G]
        guesses = HostGuesses(
            batch=batch,
            entries_G=entries_G,
            noise=SharedNoise([entry.request for entry in entries]),
            ends_G=np.array([entry.end for entry in entries], dtype=np.int64),
        )
        self.remember(guesses)
        return guesses

    def remember(self, guesses: Guesses) -> None:
        """Until it is known what came."""
        self._open.append(guesses)

    def tables(self) -> dict[str, NDArray]:
        """The learned tables, for `DeviceGuesser`."""
        return {"weights": self._mixture.weights(), "ratios": self._reliability.ratios()}

    @torch.inference_mode()
    def children(
        self,
        guesses: HostGuesses,
        logits_RD: torch.Tensor,
        trees_R: NDArray[np.int64],
        depths_R: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and probabilities [R, W] of the nodes' children, the most probable first.

        ``depths_R``: of the nodes, 0 for roots.
        """
        positions_R = guesses.ends_G[trees_R] + depths_R
        found = guesses.noise.candidates(logits_RD, trees_R, positions_R, CANDIDATES)
        cases = self.cases(found, depths_R)
        probs_RC = self._reliability.corrected(cases.contexts_R, cases.estimates_RC)
        guesses.guessed.append(cases)
        best_RW = np.argsort(-probs_RC, axis=1, kind="stable")[:, : self._topk]
        tokens_RW = np.take_along_axis(cases.tokens_RC, best_RW, axis=1)
        return tokens_RW, np.take_along_axis(probs_RC, best_RW, axis=1)

    def cases(self, found: Candidates, depths_R: NDArray[np.int64]) -> Cases:
        """The cases of nodes of these depths."""
        ids_D, index_RC = self._token_ids_D, found.index_RC
        components_RCK = found.components()
        highest_R = found.probs_RC.max(axis=1)
        contexts_R = self._mixture.contexts(found.is_greedy_R, depths_R, highest_R)
        return Cases(
            contexts_R=contexts_R,
            components_RCK=components_RCK,
            tokens_RC=index_RC if ids_D is None else ids_D[index_RC],
            estimates_RC=self._mixture.probabilities(contexts_R, components_RCK),
        )

    def learn(self, batch: Batch, results: list[EntryResult]) -> None:
        """From the tokens emitted: along their path as far as there were guesses."""
        guesses = next((each for each in self._open if each.batch is batch), None)
        if guesses is None:
            return
        self._open.remove(guesses)
        followed = guesses.followed(results)
        if followed is None:
            return
        cases, tokens = followed
        came_true = cases.tokens_RC == np.array(tokens)[:, None]
        # The same token may come twice, once with probability 0.
        came_true &= cases.components_RCK.any(axis=2)
        self._mixture.learn(cases.contexts_R, cases.components_RCK, came_true)
        self._reliability.learn(cases.contexts_R, cases.estimates_RC, came_true)
