"""langchain's chat model: bound tools, and structured output by its three methods.

Run in langchain's own environment:
``python langchain_client.py URL_OF_TOOLS URL_OF_GRAMMARS BIASES``.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def add(one: int) -> int:
    """One more."""
    return one + 1


class Answer(BaseModel):
    """What is to be answered."""

    kind: Literal["one"]


def model(url: str, **options: object) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="default", **options)


def main(url_of_tools: str, url_of_grammars: str, biases: str) -> None:
    """``biases``: as JSON, by token id, so that a model of no sense ends its answers."""
    bound = model(url_of_tools, temperature=0, max_tokens=40).bind_tools([add])
    messages = [("user", "fifteen")]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
    again = bound.invoke([*messages, answer, result])
    streamed = [part for chunk in bound.stream(messages) for part in chunk.tool_call_chunks]
    structured = {}
    for method in ("json_schema", "function_calling", "json_mode"):
        asked = model(
            url_of_grammars, temperature=1, max_tokens=200, seed=5, logit_bias=json.loads(biases)
        )
        # json_mode has no schema: what comes is an object, and need not be an answer.
        schema = None if method == "json_mode" else Answer
        found = asked.with_structured_output(schema, method=method, include_raw=True).invoke("x")
        parsed = found["parsed"]
        structured[method] = parsed.model_dump() if isinstance(parsed, BaseModel) else parsed
    print(
        json.dumps(
            {
                "call": [call["name"], call["args"]],
                "streamed": [part["name"] for part in streamed],
                "second turn": again.content,
                "structured": structured,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
