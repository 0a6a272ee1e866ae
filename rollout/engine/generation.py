"""The engine's calls that generate and score: one step, and generate, stream and score, which run
steps until all is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import torch

from rollout.engine.corpora import Corpora
from rollout.engine.lifecycle import Lifecycle
from rollout.engine.requests import RequestFactory
from rollout.engine.step_runner import StepRunner
from rollout.engine.streaming import RolloutStream, in_order_of_plain_decoding
from rollout.engine.tokenizer import PromptEncoder
from rollout.engine.worker import Worker
from rollout.errors import InvalidInputError, OutOfMemoryError
from rollout.types import Prompt, Request, Rollout, SamplingParams, TokenExtras
from rollout.validation import checked_iterable

_MAX_REQUESTS = 1 << 22
"""The most requests of one call: each takes some kilobytes from the first step to the last."""


class Generation:
    """Runs steps, one or as many as its calls need until all of their requests have ended."""

    def __init__(
        self,
        worker: Worker,
        encoder: PromptEncoder,
        requests: RequestFactory,
        steps: StepRunner,
        lifecycle: Lifecycle,
        corpora: Corpora,
    ) -> None:
        self._worker = worker
        self._encoder = encoder
        self._requests = requests
        self._steps = steps
        self._lifecycle = lifecycle
        self._corpora = corpora

    def run_step(self) -> None:
        """Run one step. Raises what `Lifecycle.require_running` does."""
        self._lifecycle.require_running()
        self._corpora.load_configured_corpora()
        self._steps.run()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Rollout]:
        requests = self._requests_for(prompts, params)
        with closing(self._run_all(requests)) as steps:
            rollouts = [rollout for ended in steps for rollout in ended]
        rollouts.sort(key=lambda rollout: (rollout.prompt_index, rollout.sample_index))
        return rollouts

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> RolloutStream:
        return RolloutStream(self._rollouts(prompts, params), self._steps.guard)

    def _rollouts(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[Rollout, None, None]:
        requests = self._requests_for(prompts, params)
        with closing(self._run_all(requests)) as steps:
            max_running = self._steps.scheduler.limits.max_running
            yield from in_order_of_plain_decoding(requests, max_running, steps)

    def _requests_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        """All samples of all prompts, checked, the samples of one prompt together.

        Where this rank's are refused, others in lockstep with it are served all the same.
        """
        try:
            return self._checked_requests(prompts, params)
        except (InvalidInputError, OutOfMemoryError):
            self._run_idle_steps()
            raise

    def _checked_requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        listed = list(checked_iterable(prompts, "prompts", "prompts, not one prompt"))
        first = listed[0] if listed else ""
        is_message = isinstance(first, dict) and "role" in first
        if is_message or isinstance(first, int) or getattr(first, "ndim", 1) == 0:
            raise InvalidInputError("prompts", prompts, "must be a list of prompts, not one prompt")
        if isinstance(params, SamplingParams):
            each = [params] * len(listed)
        else:
            each = list(checked_iterable(params, "params", "SamplingParams, or one for all"))
        if len(each) != len(listed):
            raise InvalidInputError("params", len(each), f"must be one, or {len(listed)}: one each")
        for index, own in enumerate(each):
            if not isinstance(own, SamplingParams):
                raise InvalidInputError(f"params[{index}]", own, "must be a SamplingParams")
        num_requests = sum(own.n for own in each)
        if num_requests > _MAX_REQUESTS:
            raise InvalidInputError(
                "params.n", num_requests, f"must be at most {_MAX_REQUESTS} samples in one call"
            )
        requests: list[Request] = []
        for index, (prompt, own) in enumerate(zip(listed, each, strict=True)):
            field = f"prompts[{index}]"
            ids = self._encoder.encode(prompt, field)
            requests += [
                self._requests.make(ids, own, index, sample, field=field) for sample in range(own.n)
            ]
        return requests

    def _run_all(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """The rollouts that ended in each step, until all have. Closed early, it aborts what is
        unfinished."""
        inbox: deque[Rollout] = deque()
        unfinished = {request.request_id for request in requests}
        try:
            self._steps.add(requests, inbox)
            while self._any_rank(bool(unfinished)):
                if not inbox or self._worker.ranks.rows.size > 1:
                    self.run_step()
                ended = list(inbox)
                inbox.clear()
                unfinished.difference_update(rollout.request_id for rollout in ended)
                yield ended
        except GeneratorExit:
            self._steps.drop(unfinished)
            self._run_idle_steps()
            raise
        finally:
            self._steps.drop(unfinished)

    def _any_rank(self, has_work: bool) -> bool:
        """Whether the answer is yes on any rank in lockstep; a collective."""
        return any(self._worker.ranks.rows.all_gather_int(has_work))

    def _run_idle_steps(self) -> None:
        """Run steps without requests of this rank until no rank in lockstep has work."""
        while self._worker.ranks.rows.size > 1 and self._any_rank(False):
            self.run_step()

    def any_rank_has_unfinished(self) -> bool:
        """See `RolloutEngine.any_rank_has_unfinished`."""
        return self._any_rank(self._steps.has_unfinished)

    def score_with_extras(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        params: SamplingParams | None = None,
        observe: Callable[[torch.Tensor], object] | None = None,
    ) -> tuple[list[float], TokenExtras]:
        self._lifecycle.require_running()
        try:
            request, output = self._scored(
                prompt_ids, output_ids, SamplingParams() if params is None else params
            )
            with self._steps.guard.uninterrupted(), self._steps.all_or_none():
                return self._worker.score(request, output, observe)
        except (InvalidInputError, OutOfMemoryError):
            self._worker.score_idle()
            raise

    def _scored(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams
    ) -> tuple[Request, list[int]]:
        prompt = self._encoder.encode(prompt_ids, "prompt_ids")
        output = self._encoder.encode(output_ids, "output_ids")
        if len(prompt) + len(output) > self._worker.max_context_len:
            raise InvalidInputError(
                "output_ids", len(output),
                f"prompt and output must fit the context of {self._worker.max_context_len} tokens",
            )  # fmt: skip
        return self._requests.make(prompt, params, 0, 0), output
