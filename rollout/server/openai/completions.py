"""`POST /v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rollout.server.disconnect import while_connected
from rollout.server.documented import EVENTS
from rollout.server.event_stream import EventStream
from rollout.server.openai.answer import Heading, json_response, stream_while_connected
from rollout.server.openai.completion_answer import CompletionAnswer
from rollout.server.openai.completion_body import CompletionBody
from rollout.server.openai.echo import Echo, echo_of
from rollout.server.openai.logprobs import LogprobWriter
from rollout.server.openai.models import require_model
from rollout.server.openai.output_text import OutputTexts
from rollout.server.openai.route import OpenAIRoute
from rollout.server.openai.token_spelling import TokenSpelling
from rollout.server.samples import SampleRequest
from rollout.server.serving import Serving


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
    texts = OutputTexts(serving.encoder)
    spelling = TokenSpelling(serving.encoder.tokenizer)

    @router.post("/v1/completions", responses=EVENTS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The samples of each prompt one after the other, the prompts in their order."""
        require_model(serving, body.model)
        body.check_fields()
        serving.require_batch(body.num_samples * len(body.prompts), "n")
        samples = await _samples(serving, body)
        answer = CompletionAnswer(
            heading=Heading.new("cmpl", "text_completion", serving.model_name),
            body=body,
            samples=samples,
            echoes=await while_connected(request, _echoes(serving, body, samples)),
            writer=LogprobWriter(spelling, bool(body.return_tokens_as_token_ids)),
            texts=texts,
        )
        if body.only_scores:
            return await json_response(answer.of_prompts)
        if body.stream:
            deltas = await stream_while_connected(request, serving, samples)
            return EventStream(answer.parts(deltas), deltas)
        rollouts = await while_connected(request, serving.generate(samples))
        return await json_response(lambda: answer.whole(rollouts))

    return router


async def _samples(serving: Serving, body: CompletionBody) -> list[SampleRequest]:
    params = body.params(serving.fresh_seed())
    prompts = await serving.encode(body.prompts, "prompt")
    return [
        SampleRequest(
            prompt_ids=prompt_ids,
            params=params,
            prompt_index=prompt_index,
            sample_index=sample_index,
        )
        for prompt_index, prompt_ids in enumerate(prompts)
        for sample_index in range(body.num_samples)
    ]


async def _echoes(
    serving: Serving, body: CompletionBody, samples: list[SampleRequest]
) -> list[Echo]:
    if not body.echo:
        return []
    firsts = samples[:: body.num_samples]
    return [
        await echo_of(
            serving,
            prompt,
            sample.prompt_ids,
            sample.params,
            with_logprobs=body.logprobs is not None,
        )
        for prompt, sample in zip(body.prompts, firsts, strict=True)
    ]
