"""vLLM's side of a proposer: rows of tokens that move, and requests whose outputs are given."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCABULARY = 1000


def vllm_config(
    num_tokens: Any = 4, max_rows: int = 8, max_len: int = 256, eager: bool = True, **options: Any
) -> Any:
    """The part of vLLM's configuration that a proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        model_config=SimpleNamespace(
            max_model_len=max_len, get_vocab_size=lambda: VOCABULARY, tokenizer="/",
            enforce_eager=eager,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_rows),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8]),
        additional_config={"specrollout": options} if options else {},
    )  # fmt: skip


@dataclass(eq=False)
class RowRequest:
    """A request whose output is decided beforehand."""

    prompt: list[int]
    output: list[int]
    done: int = 0  # tokens of the output that were emitted

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output[: self.done]

    def emit(self, draft: list[int]) -> list[int]:
        """The accepted tokens of the draft and one more, as the rejection sampler emits them."""
        emitted: list[int] = []
        for token in self.output[self.done :]:
            emitted.append(token)
            if len(emitted) > len(draft) or draft[len(emitted) - 1] != token:
                break
        self.done += len(emitted)
        return emitted


class VllmRows:
    """The arrays of vLLM's model runner, and the calls that it makes with them."""

    def __init__(self, proposer: Any, max_rows: int = 8, max_len: int = 256) -> None:
        self.proposer = proposer
        self.requests: list[RowRequest] = []  # by row
        self.drafts: dict[RowRequest, list[int]] = {}
        self.lengths_R = np.zeros(max_rows, dtype=np.int32)
        self.token_ids_RL = np.zeros((max_rows, max_len), dtype=np.int32)

    def step(self, in_prefill: set[RowRequest] = frozenset()) -> None:
        """One step of all rows; those in prefill sample nothing."""
        sampled = [
            [] if each in in_prefill else each.emit(self.drafts.get(each, []))
            for each in self.requests
        ]
        for row, request in enumerate(self.requests):
            self.lengths_R[row] = len(request.tokens)
            self.token_ids_RL[row, : len(request.tokens)] = request.tokens
        drafts = self.proposer.propose(sampled, self.lengths_R, self.token_ids_RL)
        assert len(drafts) == len(self.requests)
        self.drafts = dict(zip(self.requests, drafts, strict=True))

    def run(self, requests: list[RowRequest]) -> int:
        """Run these to their ends, the last row moving into each that is freed. Steps taken."""
        self.requests, steps = list(requests), 0
        while self.requests:
            self.step()
            steps += 1
            for request in [each for each in self.requests if each.done == len(each.output)]:
                self.leave(request)
        return steps

    def leave(self, request: RowRequest) -> None:
        """End, abort or preempt a request: the last row's request takes its place."""
        row = self.requests.index(request)
        self.requests[row] = self.requests[-1]
        self.requests.pop()
        self.drafts.pop(request, None)
