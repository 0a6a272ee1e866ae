"""Made-up logs of runs, like those of `rollout.offline.run_log`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

STARTED = 1_800_000_000.0  # Unix seconds
ROWS = (4, 8, 16, 32, 64, 128)

Line = dict[str, Any]


def run_lines(
    *,
    num_steps: int = 200,
    num_groups: int = 8,
    samples: int = 4,
    seed: int = 0,
    spec: str = "ngram",
    started: float = STARTED,
) -> list[Line]:
    """A whole run: all requests decode for their lengths, so that it thins out towards its end."""
    random = np.random.default_rng(seed)
    lines = [run_line(spec=spec, started=started)]
    num_requests = num_groups * samples
    lengths = np.sort(random.gamma(2.0, num_steps / 8, num_requests).astype(int) + 1)
    lengths = np.minimum(lengths * num_steps // lengths[-1], num_steps)
    ends = np.maximum(lengths, 1)
    order = random.permutation(num_requests)
    seconds, last = 0.0, {"generated": 0}
    for step in range(1, num_steps + 1):
        sampling = int((ends >= step).sum())
        drafted = int(random.integers(0, 3 * sampling + 1)) if spec != "none" else 0
        accepted = int(random.binomial(drafted, 0.4))
        rows = sampling + drafted
        predicted = 12.0 + 0.4 * rows if spec != "none" else 0.0
        total = (12.0 + 0.4 * rows) * float(random.lognormal(0, 0.08))
        total *= 20 if random.random() < 0.01 else 1  # a hiccup of the machine
        seconds += total / 1e3
        last["generated"] += sampling + accepted
        for request in np.flatnonzero(ends == step):
            prompt, sample = divmod(int(order[request]), samples)
            lines.append(rollout_line(prompt, sample, step, int(ends[request]),
                                      time=started + seconds, drafts=spec != "none"))  # fmt: skip
        lines.append(
            step_line(
                step, time=started + seconds, running=int((ends > step).sum()), sampling=sampling,
                query_tokens=rows, generated_tokens=sampling + accepted, proposed=2 * drafted,
                drafted=drafted, accepted=accepted, expected_accepted=0.42 * drafted,
                predicted_ms=predicted, predicted_gain_ms=0.2 * drafted,
                gain_ms=0.5 * accepted - 0.02 * drafted, draft_ms=0.03 * total,
                forward_ms=0.8 * total, sample_ms=0.1 * total, schedule_ms=0.02 * total,
                total_ms=total, total_generated_tokens=last["generated"],
            )
        )  # fmt: skip
    learned = learned_line() if spec != "none" else {"kind": "learned"}
    return [*lines, {**learned, "time": started + seconds}]


def run_line(*, spec: str = "ngram", started: float = STARTED) -> Line:
    return {
        "kind": "run",
        "time": started,
        "model": "my/model",
        "data": "prompts.jsonl",
        "spec": {"_target_": f"spec_workers.{spec}.build"},
        "n": 4,
        "temperature": 0.7,
        "max_new_tokens": 200,
    }


def step_line(step: int, **values: float) -> Line:
    return {"kind": "step", "time": STARTED + step, "step": step, "waiting": 0, **values}


def rollout_line(
    prompt: int, sample: int, step: int, verify_steps: int, *, time: float, drafts: bool = True
) -> Line:
    accepted = verify_steps // 3 if drafts else 0
    return {
        "kind": "rollout",
        "time": time,
        "step": step,
        "submitted_step": 0,
        "request_id": prompt * 100 + sample,
        "prompt_index": prompt,
        "sample_index": sample,
        "group": f"{prompt:016x}",
        "prompt_tokens": 20 + prompt,
        "generated_tokens": verify_steps + accepted,
        "finish_reason": "length" if verify_steps > 150 else "stop",
        "verify_steps": verify_steps,
        "proposed": 3 * accepted,
        "drafted": 2 * accepted,
        "accepted": accepted,
        "expected_accepted": accepted * 1.1,
        "predicted_gain_ms": 2.0 * accepted,
        "gain_ms": 1.5 * accepted,
        "preemptions": 0,
    }


def learned_line() -> Line:
    counts = [9000, 4000, 2000, 1500, 1000, 800, 600, 500, 400, 300]
    return {
        "kind": "learned",
        "time": STARTED,
        "budget": {
            "device": "CPU, 2 threads, bfloat16",
            "cost": {
                "rows": list(ROWS),
                "milliseconds": [12 + 0.4 * r for r in ROWS],
                "observations": [30, 20, 10, 5, 1, 0],
            },
            "calibration": {
                "sources": ["group", "live"],
                "count": [counts, [0] * 10],
                "expected": [[(k + 0.5) / 10 * n for k, n in enumerate(counts)], [0] * 10],
                "accepted": [[round((k + 0.3) / 10 * n) for k, n in enumerate(counts)], [0] * 10],
            },
            "gate": {"state": "open", "probes": 3},
        },
        "lengths": {"groups": 8, "error": 0.25},
    }


def write_lines(path: Path, lines: list[Line]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
