"""A proposer for vLLM that never drafts: what vLLM itself asks for having one.

vLLM 0.32 samples every step by its rejection sampler once it has a proposer, with drafts or
without. That one draws a random number for each row and token of the vocabulary, which takes 16 of
75 ms of a step of 16 rows of the demo model on one core of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence


class IdleProposer:
    def __init__(self, vllm_config: object) -> None:
        pass

    def load_model(self, *args: object, **kwargs: object) -> None:
        """There is none."""

    def propose(
        self, sampled_token_ids: Sequence[object], *args: object, **kwargs: object
    ) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
