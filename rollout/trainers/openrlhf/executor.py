"""OpenRLHF's executors: what turns a prompt into a trajectory, calling the engine on the way."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rollout.errors import InvalidInputError


class Executor(Protocol):
    """`openrlhf.utils.agent.AgentExecutorBase`."""

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """One trajectory, as OpenRLHF's samples generator reads it."""
        ...


def load_executor(agent_path: str | None, reward_endpoints: Sequence[str] | None) -> Executor:
    """The ``AgentExecutor`` of a user's file, or OpenRLHF's own of a single turn.

    Raises InvalidInputError for a file without such a class.
    """
    from openrlhf.utils.agent import AgentExecutorBase, SingleTurnAgentExecutor

    if not agent_path:
        return SingleTurnAgentExecutor(reward_endpoints)
    argument = "--train.agent_func_path"
    if Path(agent_path).suffix != ".py":
        raise InvalidInputError(argument, agent_path, "must be a Python file")
    spec = importlib.util.spec_from_file_location("agent_module", agent_path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    executor = getattr(module, "AgentExecutor", None)
    if not (isinstance(executor, type) and issubclass(executor, AgentExecutorBase)):
        raise InvalidInputError(
            argument, agent_path, "must define AgentExecutor, a subclass of AgentExecutorBase"
        )
    return executor()
