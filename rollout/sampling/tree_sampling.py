"""The target's own sample at every root and draft node, and the walk along them.

At every tree node the target has sampled its next token. The walk from the root follows the child
that equals that sample and stops where there is none, so what is emitted is always the target's
own sample: the draft decides how many samples one forward yields and nothing else.

Legend: B entries, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.ops import gpu
from rollout.sampling.device_sampler import SampledTrees
from rollout.sampling.rows import sample_rows
from rollout.sampling.sampled import Sampled
from rollout.sampling.sampler import sample
from rollout.types import Batch, DraftTrees


def accept(
    draft_tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """Walk one draft tree.

    Args:
        draft_tokens: token of draft node j, which is tree node j + 1.
        parents: its parent in tree numbering (0 is the root); parents come before children.
        sampled: the target's sample at each tree node, the root first: one more than drafts.

    Returns the accepted tree nodes in path order. The tokens emitted are ``sampled[0]`` and then
    ``sampled[node]`` for each of them. Of equal siblings the first counts.
    """
    path: list[int] = []
    node = 0
    for child, (token, parent) in enumerate(zip(draft_tokens, parents, strict=True), start=1):
        if parent == node and token == sampled[node]:
            path.append(child)
            node = child
    return path


@dataclass(kw_only=True, slots=True)
class TreeSamples:
    sampled: Sampled  # at each entry's root, then at its nodes
    offsets_B1: NDArray[np.int64]  # entry b owns rows [offsets[b], offsets[b + 1]) of those
    paths: list[list[int]]  # of each entry: accepted nodes, tree numbering, in order


class PendingSamples(Protocol):
    def read(self) -> TreeSamples:
        """Waits for them, and for nothing that was launched later."""
        ...


@dataclass(slots=True)
class _Known:
    samples: TreeSamples

    def read(self) -> TreeSamples:
        return self.samples


@dataclass(slots=True)
class _OnTheirWay:
    trees: SampledTrees
    offsets_B1: NDArray[np.int64]

    def read(self) -> TreeSamples:
        sampled, paths = self.trees.read()
        return TreeSamples(sampled=sampled, offsets_B1=self.offsets_B1, paths=paths)


def sample_trees(batch: Batch, trees: DraftTrees, logits_RV: torch.Tensor) -> PendingSamples:
    """Sample every row of ``logits_RV``, as `sampler.sample` does, and walk each tree.

    On a GPU that is launched, and the copy back of what was sampled and accepted behind it.
    """
    rows, offsets_B1 = sample_rows(batch, trees)
    if rows.requests and gpu.runs_on(logits_RV.device):
        return _OnTheirWay(SampledTrees(logits_RV, rows, trees, offsets_B1), offsets_B1)
    if rows.requests:
        sampled = sample(logits_RV, rows)
        paths = [
            _walk(trees, b, sampled.tokens[first:last])
            for b, (first, last) in enumerate(pairwise(offsets_B1.tolist()))
        ]
    else:
        sampled = Sampled(tokens=[], logprobs=[], extras=[])
        paths = [[] for _ in batch.entries]
    return _Known(TreeSamples(sampled=sampled, offsets_B1=offsets_B1, paths=paths))


def _walk(trees: DraftTrees, b: int, sampled: list[int]) -> list[int]:
    if not sampled:
        return []
    nodes = slice(int(trees.offsets_B1[b]), int(trees.offsets_B1[b + 1]))
    return accept(trees.tokens_N[nodes].tolist(), trees.parents_N[nodes].tolist(), sampled)
