"""The sampling fields of both kinds of completion: OpenAI's, and vLLM's beside them."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.errors import InvalidInputError
from rollout.sampling.parameter_names import our_fields
from rollout.server.body_fields import Biases, Listed, Rid, biases_by_id, refuse_unknown
from rollout.server.openai.output_grammar import GrammarBody
from rollout.types import SamplingParams

HARMLESS = frozenset(
    {
        # Who asks, and how it is billed and stored
        "user", "store", "metadata", "safety_identifier", "session_id",
        # Caches and scheduling: no token depends on them
        "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_salt",
        "priority", "stream_interval",
        # Says how to use tools, which text completions refuse
        "parallel_tool_calls",
    }
)  # fmt: skip


class StreamOptions(BaseModel):
    """Options of streams. ``continuous_usage_stats``: every part has the usage of its choice."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def of_parts(self) -> bool:
        """Whether every part has the usage of its choice."""
        return bool(self.include_usage and self.continuous_usage_stats)

    def check_fields(self) -> None:
        """Raises InvalidInputError for unknown options."""
        refuse_unknown(self.model_extra, {"include_obfuscation"}, "stream_options.")


class SamplingFields(GrammarBody):
    """OpenAI's sampling fields and vLLM's. Null means the default."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = Field(None, description="by token id")
    stop: str | Listed[str] | None = None
    stop_regex: str | Listed[str] | None = Field(
        None, description="sglang's: ends the output where its text ends in a match"
    )
    seed: int | None = Field(
        None, description="the same seed gives the same tokens; default: others each time"
    )

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: Listed[int] | None = Field(None, description="others are not drawn")
    bad_words: Listed[str] | None = Field(None, description="are not completed")
    logprob_token_ids: Listed[int] | None = Field(
        None, description="tokens whose logprobs are told beside the most likely ones"
    )

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return 1 if self.n is None else self.n

    def sampling_params(self, max_tokens: int, seed: int, **asked: Any) -> SamplingParams:
        """The engine's sampling parameters. Raises InvalidInputError naming the body's field.

        ``asked``: of SamplingParams that the body has beside these fields.
        """
        given = our_fields({name: getattr(self, name) for name in SamplingFields.model_fields})
        for kind in ("json_schema", "regex", "ebnf"):
            given.pop(kind, None)
        if self.grammar is not None:
            given |= [self.grammar]
        given["logit_bias"] = biases_by_id(self.logit_bias, "logit_bias")
        given.setdefault("seed", seed)
        try:
            return SamplingParams(**given | asked | {"max_new_tokens": max_tokens})
        except InvalidInputError as error:
            name = error.field.removeprefix("sampling.")
            raise InvalidInputError(
                _BODY_NAMES.get(name, name), error.value, error.remedy
            ) from None


class OpenAISamplingBody(SamplingFields):
    """The fields of both kinds of completion; for unknown ones see `refuse_unknown`."""

    model: str | None = Field(None, description="the served one's name; default: it")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Rid | None = None
    request_id: Rid | None = Field(None, description="the answer's id, and vLLM's name of rid")

    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = Field(None, description="sglang's name of the same")
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_sampling_mask: bool | None = Field(
        None, description="the tokens that top_k, top_p and min_p left are told by position"
    )
    return_routed_experts: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        None, description="tokens in logprobs are spelled `token_id:ID`"
    )

    @model_validator(mode="after")
    def _keep_stop_strings(self) -> Self:
        if self.no_stop_trim:
            self.include_stop_str_in_output = True
        return self

    @property
    def skips_special_tokens(self) -> bool:
        """Special tokens are no part of the text."""
        return self.skip_special_tokens is not False

    @property
    def asked_of_tokens(self) -> dict[str, bool]:
        """Fields of SamplingParams that ask for more of each token."""
        return {
            "sampling_mask": bool(self.return_sampling_mask),
            "routed_experts": bool(self.return_routed_experts),
        }

    @property
    def wants_usage(self) -> bool:
        """Whether usage comes as a last event of its own."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_fields(self) -> None:
        """Raises InvalidInputError for unknown fields, and for stream_options without a stream."""
        refuse_unknown(self.model_extra, HARMLESS)
        if self.stream_options is not None:
            self.stream_options.check_fields()
            if not self.stream:
                raise InvalidInputError("stream_options", self.stream_options, "needs stream=true")


_BODY_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs": "logprobs",
    "sampling_mask": "return_sampling_mask",
    "routed_experts": "return_routed_experts",
}
