"""A verifiers environment of several turns: sums, with a correction after each wrong answer."""

from __future__ import annotations

import re
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset
from sums_task import Problem, SumsTask


class CorrectionsEnv(vf.MultiTurnEnv):  # type: ignore[misc]
    """A sum is asked; a wrong answer gets "Too low" or "Too high" and another turn.

    The reward is 1 over the turn in which the right number came. An answer that the length limit
    cut ends the conversation: it has no stop token after which a next turn could go on.
    """

    def __init__(self, task: SumsTask, max_turns: int) -> None:
        super().__init__(
            max_turns=max_turns,
            eval_dataset=Dataset.from_list(list(map(conversation, task.held_out))),
            rubric=vf.Rubric(funcs=[self.speed]),
        )

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        """The user's answer to the last turn."""
        number = last_number(messages)
        if number is None:
            reply = "Give a number."
        else:
            reply = "Too low." if number < int(state["answer"]) else "Too high."
        question = state["prompt"][-1]["content"]
        return [vf.UserMessage(content=f"{reply} Try again: {question}")]

    async def get_model_response(
        self, state: vf.State, prompt: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Each turn of each conversation has its own seed, so that a run can be repeated."""
        seed = state["info"]["seed"] + len(state["trajectory"])
        kwargs["sampling_args"] = {**(state["sampling_args"] or {}), "seed": seed}
        return await super().get_model_response(state, prompt, *args, **kwargs)

    @vf.stop  # type: ignore[untyped-decorator]
    async def solved(self, state: vf.State) -> bool:
        turns = state["trajectory"]
        return bool(turns) and last_number(turns[-1]["completion"]) == int(state["answer"])

    @vf.stop  # type: ignore[untyped-decorator]
    async def cut(self, state: vf.State) -> bool:
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["is_truncated"]

    async def speed(self, state: vf.State) -> float:
        """1 for the first turn, 1/2 for the second, ...; 0 for conversations without the answer."""
        return 1 / len(state["trajectory"]) if await self.solved(state) else 0.0


def conversation(problem: Problem, seed: int = 0, example_id: int = 0) -> dict[str, Any]:
    """The input of one rollout, as verifiers wants it."""
    return {
        "prompt": [{"role": "user", "content": problem["question"]}],
        "answer": problem["answer"],
        "example_id": example_id,
        "info": {"seed": seed},
    }


def last_number(messages: Any) -> int | None:
    """The last number in the last message."""
    numbers = re.findall(r"-?\d+", messages[-1]["content"] or "")
    return int(numbers[-1]) if numbers else None
