"""One of several ranks in lockstep, with parts of every MLP, or of attention too.

``python -m tests.helpers.row_ranks out.json``, as `launch` starts it, with the cases in ROW_RANKS.
Writes of each whether every number was that of one rank alone.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.rendezvous import rendezvous

from rollout import RolloutEngine, SamplingParams
from rollout.errors import InvalidInputError, OutOfMemoryError
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.tensor_cases import changed, stored

SIZE = int(os.environ.get("WORLD_SIZE", "1"))
TENSOR = int(os.environ.get("ROW_RANKS_TENSOR", "1"))  # consecutive ranks with the same requests
RANK = int(os.environ.get("RANK", "0")) // TENSOR  # among those with requests of their own
VOCABULARY = 11
MAX_TOKENS = 96


def engine_of(case: dict, size: int) -> RolloutEngine:
    lockstep = {"mode": "lockstep", "size": size, "tensor_size": TENSOR, "timeout": HANG_SECONDS}
    return RolloutEngine.from_pretrained(
        case["target"],
        case["spec"],
        spec_options=case["options"],
        max_kv_tokens=MAX_TOKENS,
        chunk_len=8,
        max_running=3,
        dtype=case["dtype"],
        parallel=lockstep if size > 1 else {},
    )


def arrivals(seed: int) -> dict[int, list[tuple[list[int], SamplingParams]]]:
    """This rank's requests by the step they come in. The first seed leaves all ranks but the last
    idle, others some for a while."""
    rng = random.Random(f"{seed} {RANK}")
    if seed == 0 and RANK < SIZE // TENSOR - 1:
        return {}
    found: dict[int, list] = {}
    for _ in range(rng.randrange(5)):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 3, 20)))]
        length = rng.choice((1, 2, 7, 13))
        params = SamplingParams(
            max_new_tokens=length, temperature=rng.choice((0.0, 0.9)), seed=seed, ignore_eos=True
        )
        found.setdefault(rng.choice((0, 0, 2, 11)), []).append((prompt, params))
    return found


def driven(engine: RolloutEngine, seed: int, update: dict | None) -> tuple[list, int]:
    """Each request's rollout, and the number of steps in which this rank had no work."""
    script, submitted, idle, step = arrivals(seed), [], 0, 0
    while True:
        for prompt, params in script.pop(step, ()):
            submitted.append(engine.submit(prompt, params, prompt_index=len(submitted)))
        has_work = engine.has_unfinished or bool(script) or (update is not None and step < 7)
        if not any(engine.worker.ranks.rows.all_gather_int(has_work)):
            break
        if step == 6 and update is not None:
            engine.update_weights_from_tensor(update)
        idle += not engine.has_unfinished
        engine.step()
        step += 1
    engine.check_integrity()
    return [[r.token_ids, r.logprobs, r.weight_versions] for r in submitted], idle


def outcome(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except (InvalidInputError, OutOfMemoryError) as error:
        return type(error).__name__
    return "taken"


def whole_calls(engine: RolloutEngine) -> list:
    """Calls that take each rank another number of steps."""
    params = SamplingParams(max_new_tokens=3 + 2 * RANK, temperature=0.8, ignore_eos=True, seed=4)
    prompts = [[1, 2, 3], [5] * 12, [7]][: (RANK + 2) % 4]
    found = [[each.token_ids, each.logprobs] for each in engine.generate(prompts, params)]
    for bad in ([10**9], [1] * (MAX_TOKENS + 1)):
        prompt = bad if RANK == 1 else [4, 5]
        found.append(outcome(engine.generate, [prompt], params))
        found.append(outcome(engine.score, prompt, [4] * 9, params))
    length = 2 * MAX_TOKENS // 3
    found.append(outcome(engine.score, [4] * length, [5] * (length if RANK == 1 else 3), params))
    for each in engine.stream([[6], [8, 9], [2]], params):
        found.append(len(each.token_ids))
        if RANK == 0:
            break
    found.append(engine.score([1, 2, 3], [4] * (1 + 8 * RANK), params))
    return found


def run(case: dict) -> dict:
    update = changed(stored(case["target"]))
    together, alone = engine_of(case, SIZE), engine_of(case, 1)
    # First, while drafts have seen the same: how far a request is when it comes can be seen.
    found, idle = driven(together, 9, update)
    same = {"update": found == driven(alone, 9, update)[0]}
    same["digest"] = together.weights_digest() == alone.weights_digest()
    found, idle_now = driven(together, 0, None)
    same["arrivals"] = found == driven(alone, 0, None)[0]
    same["calls"] = whole_calls(together) == whole_calls(alone)
    return {"same": same, "idle": idle + idle_now, "accepted": together.metrics().accepted}


def main(output: Path) -> None:
    torch.set_num_threads(1)
    store = next(iter(rendezvous("env://")))  # its host hosts it as long as this
    results = [run(case) for case in json.loads(os.environ["ROW_RANKS"])]
    output.write_text(json.dumps(results))
    del store


if __name__ == "__main__":
    main(Path(sys.argv[1]))
