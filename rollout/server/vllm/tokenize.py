"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the served model's tokenizer over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from rollout.errors import InvalidInputError
from rollout.server.body_fields import Listed, refuse_unknown
from rollout.server.openai.chat_body import ChatBody
from rollout.server.openai.chat_format import ChatFormat
from rollout.server.openai.route import OpenAIRoute
from rollout.server.openai.sampling_body import HARMLESS
from rollout.server.serving import Serving
from rollout.server.vllm.chat_prompt import chat_prompt


class TokenizeText(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(ChatBody):
    """Messages to encode, by the chat template; fields of sampling have no effect."""

    return_token_strs: bool | None = None


def _kind(body: Any) -> str:
    names = body if isinstance(body, dict) else vars(body)
    return "TokenizeChat" if "messages" in names else "TokenizeText"


TokenizeBody = Annotated[
    Annotated[TokenizeText, Tag("TokenizeText")] | Annotated[TokenizeChat, Tag("TokenizeChat")],
    Discriminator(_kind),
]


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Listed[int]


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(tags=["vllm"], route_class=OpenAIRoute)
    encoder = serving.encoder
    chat_format = ChatFormat(serving)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """The token ids that a prompt of this text, or of these messages, has."""
        serving.require_model(body.model, any_weights=True)
        if isinstance(body, TokenizeChat):
            body.check_fields()
            _, ids = await chat_prompt(chat_format, body)
        else:
            refuse_unknown(body.model_extra, HARMLESS)
            (ids,) = await serving.encode([body.prompt], add_special_tokens=body.add_special_tokens)
        strings = None
        if body.return_token_strs:
            assert encoder.tokenizer is not None
            strings = encoder.tokenizer.convert_ids_to_tokens(ids)
        return {
            "count": len(ids),
            "max_model_len": serving.max_context_len,
            "tokens": ids,
            "token_strs": strings,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """The text of tokens, special ones spelled out."""
        serving.require_model(body.model, any_weights=True)
        refuse_unknown(body.model_extra, HARMLESS)
        if encoder.tokenizer is None:
            raise _no_tokenizer("tokens")
        if len(body.tokens) > serving.max_context_len:
            raise InvalidInputError(
                "len(tokens)", len(body.tokens), f"at most {serving.max_context_len}, the context"
            )
        ids = encoder.encode(body.tokens, "tokens", may_be_empty=True)
        return {"prompt": await asyncio.to_thread(encoder.decode_with_specials, ids)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's class, settings, special tokens and chat template."""
        tokenizer = encoder.tokenizer
        if tokenizer is None:
            raise _no_tokenizer("tokenizer_info")
        settings = {name: value for name, value in tokenizer.init_kwargs.items() if _shown(name)}
        return {
            **json.loads(json.dumps(settings, default=str)),
            **tokenizer.special_tokens_map,
            "tokenizer_class": type(tokenizer).__name__,
            "chat_template": tokenizer.chat_template,
        }

    return router


def _no_tokenizer(field: str) -> InvalidInputError:
    return InvalidInputError(
        field, None, "the model folder has no tokenizer: start the server with model.tokenizer"
    )


def _shown(name: str) -> bool:
    """Paths of the server's machine are not shown."""
    return not name.endswith(("_file", "_path"))
