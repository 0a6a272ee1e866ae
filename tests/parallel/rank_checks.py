"""One of several ranks of tiny models: ``python -m tests.parallel.rank_checks out.json``, as
`launch` starts it.

CASES holds, as JSON, the check, the number of ranks and the options of each case, those of most
ranks first. The first ranks run a case of fewer. Raises where a check fails, and writes what each
gave, None where this rank had no part in it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.rendezvous import rendezvous

from rollout import RolloutEngine, SamplingParams
from rollout.config import (
    EngineConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    ParallelMode,
    engine_config,
)
from rollout.engine.following_rank import FollowingRank
from rollout.engine.worker import Worker
from rollout.engine.worker_factory import worker_factory
from rollout.errors import (
    EngineStateError,
    InvalidInputError,
    OutOfMemoryError,
    ParallelError,
    RolloutError,
    WeightUpdateError,
)
from rollout.models.checkpoint import Progress
from rollout.offline import DataConfig, OutputConfig, RunConfig, run_job
from rollout.runner import logit_blocks
from rollout.runner.graphs.capture import Tensors
from rollout.weights.checkpoint_source import CheckpointSource
from spec_workers.none import PlainWorker
from spec_workers.target import TargetWorker
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.replaying import Replay
from tests.helpers.signalled_job import signal_after
from tests.helpers.tensor_cases import PARAMS, PROMPTS, SAMPLED, changed, numbers, stored
from tests.helpers.weight_transports import sending_end

RANK = int(os.environ.get("RANK", "0"))
VOCABULARY = 11  # of models that ranks with requests of their own run
MAX_TOKENS = 96
RESULTS: list[Any] = []


def one_rank(folder: str, spec: str = "none", **options: Any) -> RolloutEngine:
    return RolloutEngine.from_pretrained(folder, spec, **{"kv_bytes": 1 << 20} | options)


def engine_of(folder: str, spec: str = "none", **options: Any) -> RolloutEngine:
    """One engine on all ranks of the case."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = {"mode": "tensor", "size": size, "timeout": HANG_SECONDS}
    return one_rank(folder, spec, **{"parallel": parallel if size > 1 else {}} | options)


def rolled_out(engine: RolloutEngine, params: SamplingParams = PARAMS) -> list:
    found = numbers(engine.generate(PROMPTS, params))
    if isinstance(engine, RolloutEngine):
        engine.check_integrity()
    return found


def run(
    folder: str, spec: str, again: bool = False, logit_rows: int = 1024, **options: Any
) -> dict[str, Any]:
    """Rollouts, their scores and counts.

    Args:
        again: they come twice, the second time with drafts of the first.
        logit_rows: most rows whose logits are computed together.
    """
    logit_blocks.MAX_ROWS = logit_rows
    engine = engine_of(folder, spec, **options)
    rollouts = rolled_out(engine, SAMPLED)
    if again:
        assert rolled_out(engine, SAMPLED) == rollouts
    scored = [engine.score(*rollout[:2], SAMPLED) for rollout in rollouts[:3]]
    if isinstance(engine, FollowingRank):
        return {"rollouts": rollouts, "scored": scored}
    metrics = engine.metrics()
    return {
        "rollouts": rollouts, "scored": scored,
        "drafted": metrics.drafted, "accepted": metrics.accepted,
        "preemptions": metrics.preemptions, "hits": engine.worker.memory.counters.hit,
    }  # fmt: skip


# Updates


def sent(engine: RolloutEngine, folder: str) -> None:
    """An update through a weight group, whose sender is a thread of rank 0."""
    port = int(engine.tensor_ranks.all_gather_text(str(free_port()))[0])
    source = CheckpointSource(folder)

    def send() -> None:
        group = sending_end(port, 3)
        for _, tensor in source:
            group.broadcast(tensor)

    sender = threading.Thread(target=send, daemon=True)
    if RANK == 0:
        sender.start()
    engine.init_weights_update_group("127.0.0.1", port, 1, 3, "weights", timeout=HANG_SECONDS)
    specs = source.manifest()
    engine.update_weights_from_distributed(
        list(specs),
        [spec.dtype for spec in specs.values()],
        [spec.shape for spec in specs.values()],
        "weights",
    )
    if RANK == 0:
        sender.join(HANG_SECONDS)


def an_update_reaches_all_ranks_or_none(folder: str, other: str) -> None:
    engine, alone = engine_of(folder), one_rank(folder)
    before, tensors = alone.weights_digest(), stored(folder)
    assert engine.weights_digest() == before
    new = changed(tensors)
    for each in (engine, alone):
        each.update_weights_from_tensor(new)
    assert engine.weights_digest() == alone.weights_digest()
    assert rolled_out(engine) == rolled_out(alone)
    for each in (engine, alone):
        each.update_weights_from_disk(other, weight_version=9)
    from_disk = alone.weights_digest()
    assert engine.weights_digest() == from_disk
    assert engine.weight_version == 9

    sent(engine, folder)
    assert engine.weights_digest() == before
    engine.release_memory()
    engine.resume_memory()
    assert engine.weights_digest() == before
    engine.update_weights_from_disk(other)

    name = "model.norm.weight"
    wrong = new | ({name: new[name][:-1]} if RANK else {})
    told = "" if RANK else "^rank 1: "
    with pytest.raises(RolloutError, match=f"{told}.*wrong shape: {name}"):
        engine.update_weights_from_tensor(wrong)
    assert RANK or engine.can_run
    assert engine.weights_digest() == from_disk

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(tensors.items()):
            if RANK and index == 5:
                raise ZeroDivisionError
            yield pair

    error, says = (ZeroDivisionError, None) if RANK else (WeightUpdateError, "^rank 1: it failed")
    with pytest.raises(error, match=says):
        engine.update_weights_from_tensor(stream())
    assert RANK or "torn" in engine.unavailable_reason
    with pytest.raises(RolloutError, match="nowhere" if RANK else "^rank 1: "):
        engine.update_weights_from_disk(str(Path(other) / "nowhere") if RANK else folder)
    engine.update_weights_from_disk(folder)
    assert engine.weights_digest() == before


# A dataset job


def job_of(folder: str, data: str, output: str) -> RunConfig:
    size = int(os.environ.get("WORLD_SIZE", "1"))
    mode = ParallelMode.tensor if size > 1 else ParallelMode.none
    return RunConfig(
        model=ModelConfig(path=folder),
        data=DataConfig(path=data),
        sampling=SamplingParams(max_new_tokens=16, n=2, logit_bias={5: -1.0}, stop_token_ids=[9]),
        output=OutputConfig(path=output),
        memory=MemoryConfig(kv_bytes=1 << 20),
        parallel=ParallelConfig(mode=mode, size=size, timeout=HANG_SECONDS),
    )


def a_job_that_was_stopped_goes_on(folder: str, data: str, output: str) -> None:
    """Rank 0 is told to stop when a few rollouts are written."""
    if RANK == 0:
        signal_after(3, signal.SIGTERM)
    for status in ("stopped", "completed", "nothing to do"):
        console = Console(file=StringIO())
        result = run_job(job_of(folder, data, output), worker_factory("ngram"), console)
        assert result.status.value == ("followed" if RANK else status)


# Captured forwards


class RankCapture:
    """As CUDA's: a capture computes once, and what is recorded runs when it is replayed. The one
    numbered ``fails_at`` fails after that."""

    shares_memory = True

    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at
        self.captured: list[Replay] = []
        self.tried = 0

    def __call__(
        self,
        function: Callable[[], Tensors],
        make_outputs: Callable[[Tensors], Tensors],
        max_bytes: int | None = None,
    ) -> Replay:
        computed = function()
        self.tried += 1
        if self.tried == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = make_outputs(computed)
        for name, tensor in computed.items():
            results[name].copy_(tensor)
        self.captured.append(Replay(function=function, results=results, num_bytes=1 + RANK))
        return self.captured[-1]

    def reset(self) -> None:
        pass


def ranks_capture_alike_or_not_at_all(folder: str, fails_at: int | None) -> dict[str, Any]:
    """``fails_at``: the capture that fails, on rank 1 alone."""
    capture = RankCapture(fails_at if RANK else None)

    def build(config: EngineConfig, progress: Progress | None = None) -> Worker:
        target = TargetWorker(config, progress, capture=capture)
        return target if target.follows else PlainWorker(target)

    size = int(os.environ["WORLD_SIZE"])
    options = {"kv_bytes": 1 << 20, "parallel": {"mode": "tensor", "size": size}}
    engine = RolloutEngine.from_config(engine_config(folder, options), build)
    rollouts = rolled_out(engine) + rolled_out(engine)
    replays = [each.replays for each in capture.captured]
    return {"rollouts": rollouts, "captured": len(capture.captured), "replays": replays}


# Ranks that fail or differ


def a_forward_that_fails_on_one_rank_is_run_again_by_none(folder: str) -> None:
    engine = engine_of(folder)
    if RANK == 0:
        engine.submit(PROMPTS[0], PARAMS)
        with engine.leading():
            engine.step()
        with pytest.raises(EngineStateError, match="do not follow this one"):
            engine.step()
        with pytest.raises(EngineStateError, match="do not follow this one"):
            engine.get_weights_by_name("lm_head.weight")
        failed = "rank 1 has ended or left: it failed in the middle of what all ranks run: Zero"
        with pytest.raises(ParallelError, match=f"^rank 0 of 2: {failed}"):
            engine.generate(PROMPTS, PARAMS)
        return
    engine.follow()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    engine._models.runner.run = fail
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, PARAMS)
    with pytest.raises(ParallelError, match=r"^rank 1 of 2: it failed in the middle"):
        engine.generate(PROMPTS, PARAMS)


def ranks_that_are_not_exact_agree(folder: str) -> list:
    """Products are added up over the ranks. Returns this rank's rollouts."""
    engine, alone = engine_of(folder, exact=False), one_rank(folder, exact=False)
    greedy = replace(PARAMS, temperature=0.0)
    tokens = [rollout[1] for rollout in rolled_out(alone, greedy)]
    assert [rollout[1] for rollout in rolled_out(engine, greedy)] == tokens
    new = changed(stored(folder))
    for each in (engine, alone):
        each.update_weights_from_tensor(new)
    assert engine.weights_digest() == alone.weights_digest()
    return rolled_out(engine, SAMPLED)


def a_call_that_rank_0_is_refused_ends_no_rank(folder: str) -> None:
    engine = engine_of(folder)
    error = EngineStateError if RANK else InvalidInputError
    with pytest.raises(error, match=r"prompts\[0\]"):
        engine.generate([[-1]], PARAMS)
    assert len(engine.generate(PROMPTS, PARAMS)) == len(PROMPTS)


def ranks_that_were_not_started_alike_are_told_in_what(folder: str, other: str) -> None:
    running, drafted = {"max_running": 3 + RANK}, {"spec_options": {"num_draft_tokens": 3 + RANK}}
    for spec, model, options, named in (
        ("none", folder, running, "scheduler.max_running is 4 on rank 1 and 3 on rank 0"),
        ("ngram", folder, drafted, "spec.num_draft_tokens is 4 on rank 1 and 3 on"),
        ("none", other if RANK else folder, {}, "config.json.num_kv_heads is 1 on rank 1 and 2 on"),
    ):  # fmt: skip
        with pytest.raises(ParallelError, match=f"^{named}.*: start all ranks alike"):
            engine_of(model, spec, **options)


def a_rank_that_is_gone_in_the_middle_of_an_update_ends_the_others(folder: str) -> None:
    """The last of all cases."""
    engine = engine_of(folder)
    engine.generate(PROMPTS[:1], PARAMS)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(stored(folder).items()):
            if RANK and index == 5:
                end()
            yield pair

    with pytest.raises(ParallelError, match=r"^rank 0 of 2: rank 1 has ended or left.*; end all"):
        engine.update_weights_from_tensor(stream())
    assert not engine.can_run
    with pytest.raises(RolloutError, match="torn"):
        engine.generate(PROMPTS, PARAMS)


# Ranks with requests of their own


class RowRank:
    """One of the ranks with requests of their own, which ``tensor`` consecutive ones share."""

    def __init__(self, tensor: int) -> None:
        self.size = int(os.environ["WORLD_SIZE"]) // tensor
        self.rank = RANK // tensor

    def arrivals(self, seed: int) -> dict[int, list[tuple[list[int], SamplingParams]]]:
        """This rank's requests by the step they come in. The first seed leaves all ranks but the
        last idle, others some for a while."""
        rng = random.Random(f"{seed} {self.rank}")
        if seed == 0 and self.rank < self.size - 1:
            return {}
        found: dict[int, list] = {}
        for _ in range(rng.randrange(5)):
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 3, 20)))]
            length, heat = rng.choice((1, 2, 7, 13)), rng.choice((0.0, 0.9))
            params = SamplingParams(
                max_new_tokens=length, temperature=heat, seed=seed, ignore_eos=True
            )
            found.setdefault(rng.choice((0, 0, 2, 11)), []).append((prompt, params))
        return found

    def driven(self, engine: RolloutEngine, seed: int, update: dict | None) -> tuple[list, int]:
        """Each request's rollout, and the number of steps in which this rank had no work."""
        script, submitted, idle, step = self.arrivals(seed), [], 0, 0
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

    def whole_calls(self, engine: RolloutEngine) -> list:
        """Calls that take each rank another number of steps."""
        params = SamplingParams(
            max_new_tokens=3 + 2 * self.rank, temperature=0.8, ignore_eos=True, seed=4
        )
        prompts = [[1, 2, 3], [5] * 12, [7]][: (self.rank + 2) % 4]
        found: list = [[r.token_ids, r.logprobs] for r in engine.generate(prompts, params)]
        is_bad = self.rank == 1
        for bad in ([10**9], [1] * (MAX_TOKENS + 1)):
            prompt = bad if is_bad else [4, 5]
            found.append(outcome(engine.generate, [prompt], params))
            found.append(outcome(engine.score, prompt, [4] * 9, params))
        length = 2 * MAX_TOKENS // 3
        found.append(outcome(engine.score, [4] * length, [5] * (length if is_bad else 3), params))
        for each in engine.stream([[6], [8, 9], [2]], params):
            found.append(len(each.token_ids))
            if self.rank == 0:
                break
        found.append(engine.score([1, 2, 3], [4] * (1 + 8 * self.rank), params))
        return found


def outcome(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except (InvalidInputError, OutOfMemoryError) as error:
        return type(error).__name__
    return "taken"


def rows_are_those_of_one_rank_alone(
    folder: str, spec: str, dtype: str, tensor: int = 1, **spec_options: Any
) -> dict[str, int]:
    size, own = int(os.environ["WORLD_SIZE"]), RowRank(tensor)
    lockstep = {"mode": "lockstep", "size": size, "tensor_size": tensor, "timeout": HANG_SECONDS}
    together, alone = (
        RolloutEngine.from_pretrained(
            folder, spec, spec_options=spec_options, max_kv_tokens=MAX_TOKENS, chunk_len=8,
            max_running=3, dtype=dtype, parallel=parallel,
        )
        for parallel in (lockstep, {})
    )  # fmt: skip
    update = changed(stored(folder))
    # First, while drafts have seen the same: how far a request is when it comes can be seen.
    if isinstance(together, FollowingRank):
        together.follow()
        return {"idle": 0, "accepted": 0}
    with together.leading():
        found, idle = own.driven(together, 9, update)
        assert found == own.driven(alone, 9, update)[0], "update"
        assert together.weights_digest() == alone.weights_digest()
        found, idle_now = own.driven(together, 0, None)
        assert found == own.driven(alone, 0, None)[0], "arrivals"
        assert own.whole_calls(together) == own.whole_calls(alone)
    return {"idle": idle + idle_now, "accepted": together.metrics().accepted}


def end() -> None:
    Path(sys.argv[1]).write_text(json.dumps(RESULTS))
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = next(iter(rendezvous("env://")))  # its host hosts it as long as this
    for check, size, options in json.loads(os.environ["CASES"]):
        os.environ["WORLD_SIZE"] = str(size)
        print(check, size, options, flush=True)
        RESULTS.append(globals()[check](**options) if size > RANK else None)
    end()
