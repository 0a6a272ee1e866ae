"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, cast

from rollout.errors import InvalidInputError
from rollout.server.body_fields import KnownIds, Listed
from rollout.server.openai.sampling_body import OpenAISamplingBody
from rollout.types import SamplingParams

_DEFAULT_MAX_TOKENS = 16


class CompletionBody(OpenAISamplingBody):
    prompt: Annotated[str | Listed[str] | Listed[int] | Listed[Listed[int]], KnownIds]
    max_tokens: int | None = None  # 0 with echo: score the prompt
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return cast("list[str | list[int]]", self.prompt)

    @property
    def only_scores(self) -> bool:
        """Nothing is generated; the prompt's own logprobs are asked for."""
        return self.max_tokens == 0 and bool(self.echo)

    def check_fields(self) -> None:
        super().check_fields()
        if not self.prompts:
            raise InvalidInputError("prompt", self.prompt, "is empty; give at least one")
        if self.best_of not in (None, self.num_samples):
            raise InvalidInputError("best_of", self.best_of, "must equal n, or be left out")
        if self.only_scores and self.stream:
            raise InvalidInputError("stream", True, "nothing is generated with max_tokens=0")
        if self.suffix:
            raise InvalidInputError("suffix", self.suffix, "this server only continues prompts")
        if self.add_special_tokens is False and isinstance(self.prompts[0], str):
            raise InvalidInputError(
                "add_special_tokens", False, "texts are encoded with them: send token ids"
            )

    def params(self, seed: int) -> SamplingParams:
        """Raises InvalidInputError naming the field."""
        max_tokens = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(
            max_tokens=1 if self.only_scores else max_tokens,
            seed=seed,
            top_logprobs=self.logprobs or 0,
        )
