"""Parsers of models' output: tool calls, one file for each format, and reasoning."""

from __future__ import annotations

from collections.abc import Mapping

from rollout.server.config import ReasoningParserName, ToolParserName
from rollout.server.openai.parsers import (
    deepseek,
    glm45,
    hermes,
    llama3,
    mistral,
    qwen3_coder,
    think,
)
from rollout.server.openai.parsers.tool_calls import ToolCallParser

TOOL_PARSERS: Mapping[ToolParserName, type[ToolCallParser]] = {
    ToolParserName.deepseek: deepseek.DeepSeekParser,
    ToolParserName.glm45: glm45.Glm45Parser,
    ToolParserName.hermes: hermes.HermesParser,
    ToolParserName.llama3: llama3.Llama3Parser,
    ToolParserName.mistral: mistral.MistralParser,
    ToolParserName.qwen3_coder: qwen3_coder.Qwen3CoderParser,
}

_SIGNS: tuple[tuple[ToolParserName, tuple[str, ...]], ...] = (
    (ToolParserName.deepseek, (deepseek.BEGIN, deepseek.SEPARATOR)),
    (ToolParserName.mistral, (mistral.BEGIN,)),
    (ToolParserName.glm45, (glm45.BEGIN, glm45.KEY)),
    (ToolParserName.qwen3_coder, (qwen3_coder.FUNCTION, qwen3_coder.PARAMETER)),
    (ToolParserName.hermes, (hermes.BEGIN,)),
    (ToolParserName.llama3, ("<|start_header_id|>", '"parameters": ')),
)
"""Texts that a chat template has where its model writes a format; the first that fits is taken."""


def tool_parser(name: ToolParserName, template: str) -> type[ToolCallParser] | None:
    """The parser of that name; with `auto` the one that the chat template's text tells of."""
    if name is ToolParserName.auto:
        fitting = (each for each, signs in _SIGNS if all(sign in template for sign in signs))
        name = next(fitting, ToolParserName.none)
    return TOOL_PARSERS.get(name)


def reads_reasoning(name: ReasoningParserName, template: str) -> bool:
    """Whether reasoning is told from answers; with `auto` where the template knows of it."""
    if name is ReasoningParserName.auto:
        return think.BEGIN in template or think.END in template
    return name is ReasoningParserName.think
