"""Drafters that a replay can drive: the corpus, and a peer it is measured beside.

Shape legend: B sequences of a call, N tokens or draft nodes of a call, flat.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ngram_native import Corpus, Proposal

SOURCES = ("group", "live", "external", "gap")
"""Names of the codes in `Drafts.sources_N`, in order."""


@dataclass(kw_only=True, slots=True)
class Drafts:
    """Draft trees of a batch, flat, without the roots.

    Entry b owns nodes ``[offsets_B1[b], offsets_B1[b + 1])``. Within an entry the root (the last
    committed token) is tree node 0 and node j, from 0, is tree node j + 1; parents come before
    children.
    """

    offsets_B1: NDArray[np.int64]
    tokens_N: NDArray[np.int32]
    parents_N: NDArray[np.int32]
    probabilities_N: NDArray[np.float32] | None = None  # that the node is accepted; if estimated
    sources_N: NDArray[np.uint8] | None = None  # index into SOURCES; if the drafter can tell


class Drafter(Protocol):
    """Anything that drafts for many sequences at once. The replay calls it in this order:

    For each step of training `set_weight_version`; then, until the step's sequences are done,
    `open` for those that begin, `propose` and `insert` for all that are open, `close` for those
    that ended.
    """

    name: str

    def set_weight_version(self, version: int) -> None:
        """Tokens from now on come from another policy."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        """A sequence begins after ``prompt``; the samples of one prompt share ``group``."""

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        """A tree of at most ``budget`` nodes for each of the open sequences."""

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        """Sequence b went on with ``tokens_N[offsets_B1[b]:offsets_B1[b + 1]]``, at least one."""

    def close(self, sequence_id: int) -> None:
        """The sequence ended."""


class CorpusDrafter:
    """The n-gram corpus; nodes less likely than ``floor`` to be accepted are not drafted."""

    def __init__(self, floor: float = 0.0, corpus: Corpus | None = None) -> None:
        self.name = f"corpus, floor {floor:g}" if floor > 0 else "corpus"
        self.corpus = Corpus(max_bytes=256 << 20) if corpus is None else corpus
        self._floor = floor

    def set_weight_version(self, version: int) -> None:
        self.corpus.set_weight_version(version)

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self.corpus.open(sequence_id, group, prompt)

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        proposal = self.ask(ids_B, budget)
        return Drafts(
            offsets_B1=proposal.offsets_B1,
            tokens_N=proposal.tokens_N,
            parents_N=proposal.parents_N,
            probabilities_N=proposal.probabilities_N,
            sources_N=proposal.sources_N,
        )

    def ask(self, ids_B: NDArray[np.int64], budget: int) -> Proposal:
        return self.corpus.propose(ids_B, np.full(len(ids_B), budget, np.int32), self._floor)

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        self.corpus.extend(ids_B, tokens_N, offsets_B1)

    def close(self, sequence_id: int) -> None:
        self.corpus.close(sequence_id)


class PromptLookupDrafter:
    """transformers' prompt lookup: what followed the last 3, 2 or 1 tokens in the sequence."""

    name = "prompt lookup"

    def __init__(self) -> None:
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        self._generator = PromptLookupCandidateGenerator(
            max_matching_ngram_size=3, max_length=sys.maxsize
        )
        self._contexts: dict[int, torch.Tensor] = {}  # int64, with room at the end
        self._lengths: dict[int, int] = {}

    def set_weight_version(self, version: int) -> None:
        """It keeps nothing from one sequence to the next."""

    def open(self, sequence_id: int, group: int, prompt: NDArray[np.int32]) -> None:
        self._contexts[sequence_id] = torch.empty(1024, dtype=torch.int64)
        self._lengths[sequence_id] = 0
        self._append(sequence_id, prompt)

    def propose(self, ids_B: NDArray[np.int64], budget: int) -> Drafts:
        self._generator.num_output_tokens = budget
        offsets = [0]
        tokens: list[int] = []
        parents: list[int] = []
        for sequence_id in ids_B.tolist():
            length = self._lengths[sequence_id]
            context = self._contexts[sequence_id][None, :length]
            drafted = self._generator.get_candidates(context)[0][0, length:].tolist()
            tokens += drafted
            parents += range(len(drafted))
            offsets.append(len(tokens))
        return Drafts(
            offsets_B1=np.array(offsets, np.int64),
            tokens_N=np.array(tokens, np.int32),
            parents_N=np.array(parents, np.int32),
        )

    def insert(
        self, ids_B: NDArray[np.int64], tokens_N: NDArray[np.int32], offsets_B1: NDArray[np.int64]
    ) -> None:
        ends = offsets_B1.tolist()
        for b, sequence_id in enumerate(ids_B.tolist()):
            self._append(sequence_id, tokens_N[ends[b] : ends[b + 1]])

    def close(self, sequence_id: int) -> None:
        del self._contexts[sequence_id], self._lengths[sequence_id]

    def _append(self, sequence_id: int, tokens: NDArray[np.int32]) -> None:
        context, begin = self._contexts[sequence_id], self._lengths[sequence_id]
        end = begin + len(tokens)
        if end > len(context):
            context = torch.cat([context, torch.empty(end, dtype=torch.int64)])
            self._contexts[sequence_id] = context
        context[begin:end] = torch.from_numpy(tokens)
        self._lengths[sequence_id] = end


DRAFTERS = ("corpus", "prompt-lookup")


def make_drafter(name: str, floor: float) -> Drafter:
    """A fresh drafter, which each replay needs.

    ``floor``: nodes the corpus holds less likely are not drafted; a peer has its own.
    """
    return CorpusDrafter(floor) if name == "corpus" else PromptLookupDrafter()
