"""verifiers' ToolEnv: several turns with a tool between them, tokens and logprobs beside the texts.

Run in verifiers' own environment: ``python verifiers_client.py URL``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import verifiers as vf
from datasets import Dataset


def add(one: int) -> int:
    """One more.

    Args:
        one: What is added to.
    """
    return one + 1


def calls(completion: Any) -> float:
    """The calls of all turns."""
    return float(sum(len(getattr(each, "tool_calls", None) or ()) for each in completion))


def main(url: str) -> None:
    os.environ["NO_KEY"] = "none"
    env = vf.ToolEnv(
        tools=[add],
        max_turns=2,
        eval_dataset=Dataset.from_list([{"question": "fifteen", "answer": "8"}] * 2),
        rubric=vf.Rubric(funcs=[calls]),
    )
    found = env.evaluate_sync(
        vf.ClientConfig(api_key_var="NO_KEY", api_base_url=f"{url}/v1"),
        model="default",
        sampling_args={
            "temperature": 0,
            "max_tokens": 40,
            "logprobs": True,
            "extra_body": {"return_token_ids": True},
        },
        num_examples=2,
        state_columns=["trajectory"],
    )
    outputs = found["outputs"]
    turns = [
        [len(step["tokens"]["completion_logprobs"]) for step in each["trajectory"]]
        for each in outputs
    ]
    ids = [
        [len(step["tokens"]["completion_ids"]) for step in each["trajectory"]] for each in outputs
    ]
    print(
        json.dumps(
            {
                "rewards": [each["reward"] for each in outputs],
                "errors": [str(each.get("error")) for each in outputs],
                "logprobs": turns,
                "ids": ids,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
