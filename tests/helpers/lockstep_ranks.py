"""One rank of several in lockstep: every forward of target and draft waits for all of them.

``python -m tests.helpers.lockstep_ranks out.json``, as `launch` starts it, with the cases in
LOCKSTEP_CASES. Writes of each whether the tokens were those of plain decoding alone, and what was
counted.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rollout import RolloutEngine, SamplingParams
from tests.helpers.hang import HANG_SECONDS

ENTRANCES = ("target.forward", "target.logits", "draft.fuse", "draft.forward", "draft.logits")


class Meeting:
    """A model whose every call meets the same call of the other ranks."""

    def __init__(self, model, name: str, calls: list[str]) -> None:
        self._model = model
        self._name = name
        self._calls = calls

    def __getattr__(self, name: str):
        found = getattr(self._model, name)
        entrance = f"{self._name}.{name}"
        if entrance not in ENTRANCES:
            return found

        def call(*args, **kwargs):
            meet(ENTRANCES.index(entrance))
            self._calls.append(entrance)
            return found(*args, **kwargs)

        return call


def meet(number: int) -> None:
    """Raises where the other ranks say another number."""
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number]))
    assert {int(each) for each in numbers} == {number}, f"{number} meets {numbers}"


def any_rank(flag: bool) -> bool:
    flags = torch.tensor([int(flag)])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def submit(engine: RolloutEngine, requests: list[tuple[list[int], int]]) -> list:
    return [
        engine.submit(
            prompt,
            SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=0.5 * (index % 2)),
            prompt_index=index,
        )
        for index, (prompt, length) in enumerate(requests)
    ]


def tokens_alone(case: dict, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    engine = RolloutEngine.from_pretrained(case["target"], "none", kv_bytes=1 << 20)
    submitted = submit(engine, requests)
    while engine.has_unfinished:
        engine.step()
    return [request.token_ids for request in submitted]


def run(case: dict, requests: list[tuple[list[int], int]]) -> dict:
    expected = tokens_alone(case, requests)
    engine = RolloutEngine.from_pretrained(
        case["target"],
        case["spec"],
        spec_options={**case["options"], "lockstep": True},
        kv_bytes=1 << 20,
        chunk_len=8,
        graph_bytes=0,  # in captured forwards nobody would meet
    )
    calls: list[str] = []
    worker = engine.worker
    worker.target.runner.model = Meeting(worker.target.model, "target", calls)
    for runner in worker.drafter.runners:
        runner.model = Meeting(runner.model, "draft", calls)
    submitted = submit(engine, requests)
    steps: list[list[str]] = []
    idle = 0
    while any_rank(engine.has_unfinished):
        idle += not engine.has_unfinished
        engine.step()
        steps.append(list(calls))
        calls.clear()
    engine.check_integrity()
    return {
        "same_tokens": [request.token_ids for request in submitted] == expected,
        "steps": len(steps),
        "idle": idle,
        "forwards": steps[0] if steps else [],
        "all_alike": all(each == steps[0] for each in steps),
        "accepted": engine.metrics().accepted,
    }


def main(output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_SECONDS))
    cases = json.loads(os.environ["LOCKSTEP_CASES"])
    results = [run(case, case["requests"][dist.get_rank()]) for case in cases]
    output.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
