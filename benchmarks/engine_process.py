"""An engine in a process of its own, vLLM's or this one, that runs jobs it is told of.

    python benchmarks/engine_process.py '{"kind": "vllm", "model": ..., "options": {...}}'

Each line on standard input is a job, each line on what was standard output its result; logs go to
standard error. It runs in the environment of either engine, and imports nothing of the other.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Outputs = list[list[int]]


class Engine(Protocol):
    """The protocol of an engine under measurement."""

    def generate(self, prompts: list[list[int]], job: dict[str, Any]) -> Outputs:
        """The output tokens of all samples of all prompts, all submitted at once."""
        ...

    def decodes(self) -> int:
        """Forwards so far, for each request those after its first token's."""
        ...

    def forget(self) -> None:
        """Drop cached prefixes: each job computes its own."""
        ...


class VllmEngine:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import vllm_temperatures
        from vllm import LLM

        self._llm = LLM(model, disable_log_stats=False, **options)
        if vllm_temperatures.mend():
            print("vLLM's temperatures were lost with drafts, and are not now", file=sys.stderr)

    def generate(self, prompts: list[list[int]], job: dict[str, Any]) -> Outputs:
        from vllm import SamplingParams

        # A seed for each request would make its sampler a loop over requests.
        params = SamplingParams(
            temperature=job["temperature"], max_tokens=job["tokens"], n=job["samples"],
            ignore_eos=True, detokenize=False,
        )  # fmt: skip
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return [list(sample.token_ids) for output in outputs for sample in output.outputs]

    def decodes(self) -> int:
        name = "vllm:inter_token_latency_seconds"  # noted for each request and step
        found: Any = [each for each in self._llm.get_metrics() if each.name == name]
        return sum(each.count for each in found)

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


class OwnEngine:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from rollout import RolloutEngine

        self._engine = RolloutEngine.from_pretrained(model, **options)
        self._decodes = 0

    def generate(self, prompts: list[list[int]], job: dict[str, Any]) -> Outputs:
        from rollout import SamplingParams

        params = SamplingParams(
            temperature=job["temperature"], max_new_tokens=job["tokens"], seed=job["seed"],
            n=job["samples"], ignore_eos=True,
        )  # fmt: skip
        self._engine.reset_metrics()
        outputs = [each.token_ids for each in self._engine.generate(prompts, params)]
        self._decodes += self._engine.metrics().target_forwards - len(outputs)
        return outputs

    def decodes(self) -> int:
        return self._decodes

    def forget(self) -> None:
        self._engine.flush_cache()


def run(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Generate for ``width`` prompts at a time; the time and what was generated in all."""
    engine.forget()
    prompts, width = job["prompts"], job["width"]
    decodes = engine.decodes()
    started = time.perf_counter()
    outputs: Outputs = []
    for begin in range(0, len(prompts), width):
        outputs += engine.generate(prompts[begin : begin + width], job)
    seconds = time.perf_counter() - started
    used = sum(resource.getrusage(who).ru_maxrss for who in _WHO)
    return {
        "seconds": seconds,
        "lengths": [len(tokens) for tokens in outputs],
        "decodes": engine.decodes() - decodes,
        "peak_bytes": used * 1024,
    }


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
_KINDS: dict[str, Callable[[str, dict[str, Any]], Engine]] = {
    "vllm": VllmEngine,
    "specrollout": OwnEngine,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines log to standard output
    asked = json.loads(sys.argv[1])
    engine: Engine = _KINDS[asked["kind"]](asked["model"], asked["options"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
