"""The sampling fields of both kinds of completion: OpenAI's, and vLLM's beside them."""

from __future__ import annotations

from pydantic import BaseModel, Field

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import our_fields
from rollout.server.body_fields import Biases, Listed, biases_by_id, refuse_unknown
from rollout.server.openai.output_grammar import GrammarBody
from rollout.types import SamplingParams

HARMLESS = frozenset(
    {
        # Who asks, and how it is billed and stored
        "user", "store", "metadata", "service_tier", "safety_identifier", "request_id",
        "session_id",
        # Caches and scheduling: no token depends on them
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt",
        "priority", "stream_interval",
        # Of tools, which text completions refuse themselves
        "parallel_tool_calls",
    }
)  # fmt: skip


class StreamOptions(BaseModel):
    """Options of streams; others are passed over."""

    include_usage: bool | None = None


class OpenAISamplingBody(GrammarBody):
    """OpenAI's sampling fields and vLLM's. Null means the default; for other fields see
    `refuse_unknown`."""

    model: str | None = Field(None, description="the served one's name; default: it")
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = Field(None, description="by token id")
    stop: str | Listed[str] | None = None
    seed: int | None = Field(
        None, description="the same seed gives the same tokens; default: others each time"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Listed[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="tokens in logprobs are spelled `token_id:ID`"
    )

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def skips_special_tokens(self) -> bool:
        """Special tokens are no part of the text."""
        return self.skip_special_tokens is not False

    @property
    def wants_usage(self) -> bool:
        """Whether usage comes as a last event of its own."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_fields(self) -> None:
        """Raises InvalidInputError for what no value of the other fields could make right."""
        refuse_unknown(self.model_extra, HARMLESS)
        if self.stream_options is not None and not self.stream:
            raise InvalidInputError("stream_options", self.stream_options, "needs stream=true")

    def sampling_params(self, max_tokens: int, seed: int, top_logprobs: int) -> SamplingParams:
        """The engine's sampling parameters. Raises InvalidInputError naming the body's field."""
        given = our_fields({name: getattr(self, name) for name in type(self).model_fields})
        for kind in ("json_schema", "regex"):
            given.pop(kind, None)
        if self.grammar is not None:
            given |= [self.grammar]
        given["logit_bias"] = biases_by_id(self.logit_bias, "logit_bias")
        given.setdefault("seed", seed)
        try:
            return SamplingParams(
                **given | {"max_new_tokens": max_tokens, "top_logprobs": top_logprobs}
            )
        except InvalidInputError as error:
            name = error.field.removeprefix("sampling.")
            raise InvalidInputError(
                _BODY_NAMES.get(name, name), error.value, error.remedy
            ) from None


_BODY_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs": "logprobs",
}
