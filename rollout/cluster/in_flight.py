"""Requests that replicas work on, and what is known of them here."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.cluster.messages import Ended, Growth, Submission
from rollout.types import Request


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request, from `submit` until it ended, over all the replicas that had it."""

    request: Request  # grows with what is reported
    deaths: int = 0  # of replicas that had it
    is_watched: bool = False  # somebody looks at its tokens as they come
    is_alone: bool = False  # its replica is given nothing else

    def submission(self) -> Submission:
        """All that is left to do: it goes on after the tokens that are known here."""
        request = self.request
        prompt_len = request.prompt_len - request.partial_len
        return Submission(
            request_id=request.request_id,
            prompt_ids=request.tokens[:prompt_len],
            partial_ids=request.tokens[prompt_len:],
            params=request.params,
            prompt_index=request.prompt_index,
            sample_index=request.sample_index,
            seed=request.seed,
            is_watched=self.is_watched,
        )

    def grow(self, growth: Growth) -> None:
        request, extras, new = self.request, self.request.extras, growth.extras
        request.tokens += growth.token_ids
        request.logprobs += growth.logprobs
        request.weight_versions += growth.weight_versions
        extras.raw_logprobs += new.raw_logprobs
        extras.sampling_logprobs += new.sampling_logprobs
        extras.top_logprobs += new.top_logprobs
        extras.entropies += new.entropies

    def end(self, ended: Ended) -> None:
        self.grow(ended.growth)
        self.request.finish_reason = ended.finish_reason
        self.request.error = ended.error
        self.request.stats = ended.stats
        self.request.routed_experts = ended.routed_experts
