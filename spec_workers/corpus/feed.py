"""Feeds committed tokens to the corpus: each exactly once, however seldom it is called."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ngram_native import Corpus
from rollout.types import Request


@dataclass(slots=True)
class _Followed:
    request: Request
    fed: int  # tokens the corpus knows
    verified: int = 0  # nodes of the latest proposal


class CorpusFeed:
    """The requests that the corpus follows, and the number of tokens it knows of each.

    It goes by what the requests hold, not by what a step emitted, so a step that fails changes
    nothing and steps may go by unfed.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.max_followed = corpus.max_sequences
        self._followed: dict[int, _Followed] = {}

    def follows(self, request: Request) -> bool:
        """Whether the corpus matches the request as it grows."""
        return request.request_id in self._followed

    def catch_up(self, requests: Iterable[Request]) -> None:
        """Tell the corpus all tokens these requests hold. A request that the corpus has no room for
        is left out."""
        behind = []
        for request in requests:
            followed = self._followed.get(request.request_id) or self._open(request)
            if followed is not None and followed.fed < len(request.tokens):
                behind.append(followed)
        self._extend(behind)

    def catch_up_all(self) -> None:
        """Tell the corpus all tokens that followed requests hold."""
        self._extend([each for each in self._followed.values()
                      if each.fed < len(each.request.tokens)])  # fmt: skip

    def note_verified(self, request: Request, num_nodes: int) -> None:
        """Note that the first ``num_nodes`` nodes of the request's latest proposal were verified,
        if there was one."""
        followed = self._followed.get(request.request_id)
        if followed is not None:
            followed.verified = num_nodes

    def leave(self, request: Request) -> None:
        """End a request: its tokens stay, unless it emitted none and was never followed."""
        if not self.follows(request) and len(request.tokens) > request.prompt_len:
            self._open(request)
        followed = self._followed.pop(request.request_id, None)
        if followed is None:
            return
        if followed.fed < len(request.tokens):
            self._extend([followed])
        self._corpus.close(request.request_id)

    def _open(self, request: Request) -> _Followed | None:
        """Open a sequence with the prompt alone: with an output, too, what a sibling emitted before
        would be lost."""
        if len(self._followed) >= self.max_followed:
            return None
        prompt = np.array(request.tokens[: request.prompt_len], dtype=np.int32)
        self._corpus.open(request.request_id, request.group, prompt)
        followed = _Followed(request, request.prompt_len)
        self._followed[request.request_id] = followed
        return followed

    def _extend(self, behind: list[_Followed]) -> None:
        if not behind:
            return
        ids, verified, offsets = [], [], [0]
        tokens: list[int] = []
        for each in behind:
            ids.append(each.request.request_id)
            verified.append(each.verified)
            tokens += each.request.tokens[each.fed :]
            offsets.append(len(tokens))
        self._corpus.extend(
            np.array(ids, dtype=np.int64),
            np.array(tokens, dtype=np.int32),
            np.array(offsets, dtype=np.int64),
            np.array(verified, dtype=np.int32),
        )
        for each in behind:
            each.fed, each.verified = len(each.request.tokens), 0
