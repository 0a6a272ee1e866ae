"""AsyncGRPOTrainer with our rollout worker and weight transfer."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

from rollout import SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import engine_config
from rollout.engine.engine_loop import EngineLoop
from rollout.engine.worker_factory import worker_factory
from rollout.errors import EngineStateError, InvalidInputError
from rollout.trainers.trl.async_grpo import RolloutWorker, WeightTransfer
from tests.cluster.thread_pool import ThreadPool
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.held_engine import HeldEngine
from tests.helpers.trl_runs import WordReward, conversations, small_engine, spec_options

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant> ",
    "fields": {"content": {"close_pattern": r"</s>|$", "content": "text"}},
}


class TreeAttention:
    """A substitute for the trainer's GPU kernel where there is no GPU."""

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,  # [T, heads, D]
        k: torch.Tensor,  # [S, kv_heads, D]
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *_: object,
        softmax_scale: float,
        **__: object,
    ) -> torch.Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(repeats, 1).transpose(0, 1) for tensor in (k, v))
        parts = []
        for index in range(len(cu_seqlens_q) - 1):
            rows = slice(cu_seqlens_q[index], cu_seqlens_q[index + 1])
            keys = slice(cu_seqlens_k[index], cu_seqlens_k[index + 1])
            num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
            mask = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(int(num_keys - num_rows))
            part = scaled_dot_product_attention(
                q[rows].transpose(0, 1), k[:, keys], v[:, keys], mask, scale=softmax_scale
            )
            parts.append(part.transpose(0, 1))
        return torch.cat(parts)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_flash_attn", lambda: TreeAttention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)


@pytest.fixture
def loop(model: Path) -> Iterator[EngineLoop]:
    with EngineLoop(small_engine(model)) as loop:
        yield loop


def config(folder: Path, **options: Any) -> AsyncGRPOConfig:
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 24,
        "max_inflight_tasks": 8,
        "token_budget": -1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
    }
    return AsyncGRPOConfig(str(folder), **defaults | options)


def tokenizer_of(model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def worker_of(
    model: Path, loop: EngineLoop[Any], args: AsyncGRPOConfig, **options: Any
) -> RolloutWorker:
    given = {"reward_funcs": WordReward(), "processing_class": tokenizer_of(model)} | options
    return RolloutWorker(loop, args, conversations(), **given)


def trainer_of(
    model: Path, loop: EngineLoop[Any], args: AsyncGRPOConfig, *, mode: str = "in_place", **own: Any
) -> AsyncGRPOTrainer:
    reward, tokenizer = WordReward(), tokenizer_of(model)
    return AsyncGRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=args,
        train_dataset=conversations(),
        processing_class=tokenizer,
        rollout_worker=worker_of(
            model, loop, args, reward_funcs=reward, processing_class=tokenizer
        ),
        weight_transfer=WeightTransfer(loop, mode=mode),
        **own,
    )


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_run(model: Path, loop: EngineLoop, tmp_path: Path, mode: str) -> None:
    check_run(model, loop, tmp_path, mode)


def test_a_run_with_replicas(model: Path, tmp_path: Path) -> None:
    settings = engine_config(str(model), {"dtype": "float32", "kv_fraction": 0.1})
    names = ["replica-0", "replica-1"]
    pool = ThreadPool(settings, worker_factory("ngram", **spec_options("ngram")), names)
    cluster = RolloutCluster(settings, ClusterConfig(kind=ClusterKind.ray, replicas=2), pool)
    try:
        with EngineLoop(cluster) as loop:
            check_run(model, loop, tmp_path, "in_place")
            assert loop.call(lambda engine: engine.weights_digest()).result()
    finally:
        cluster.close()


def check_run(model: Path, loop: EngineLoop[Any], tmp_path: Path, mode: str) -> None:
    trainer = trainer_of(model, loop, config(tmp_path), mode=mode)
    trainer.train()
    # One sync before the first rollout, one after each step; and all of them arrived.
    assert trainer.model_version == 5
    assert loop.call(lambda engine: engine.weight_version).result() == 5
    served = loop.call(lambda engine: engine.get_weights_by_name("lm_head.weight", 100)).result()
    assert served == trainer.model.lm_head.weight.flatten()[:100].tolist()
    steps = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(steps) == 4
    fresh = [step for step in steps if step["sample/staleness_max"] == 0]
    assert fresh
    assert fresh[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert fresh[0]["kl"] < 1e-7
    assert any("rollout/accept_length" in step for step in steps)
    assert loop.num_unfinished == 0
    loop.call(lambda engine: engine.check_integrity()).result()


def test_adapters_are_merged_before_they_are_sent(
    model: Path, loop: EngineLoop, tmp_path: Path
) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trainer = trainer_of(model, loop, config(tmp_path, max_steps=2), peft_config=lora)
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "ratio" in entry)
    assert first["ratio"] == pytest.approx(1, abs=1e-5)


class Echo:
    """An environment that adds to the prompt and knows the reward itself."""

    def reset(self, **_: Any) -> str:
        return " nine"

    def get_reward(self) -> float:
        return 0.5


def test_environments_are_the_trainers_own(model: Path, loop: EngineLoop, tmp_path: Path) -> None:
    worker = worker_of(model, loop, config(tmp_path), reward_funcs=[], environment_factory=Echo)
    worker.start()
    sample = worker.rollout_buffer.get(timeout=HANG_SECONDS)
    worker.stop()
    assert sample.prompt[-1]["content"].endswith(" nine")
    assert sample.metrics["rewards/Echo"] == 0.5


def test_rollouts_in_flight_go_on_under_the_new_weights(
    model: Path, loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = WeightTransfer(loop)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    weights = loop.call(_weights).result()
    held, call = HeldEngine(4), loop.call  # by then 52 of 100 tokens at most

    def call_and_go_on(function: Any) -> Any:
        future = call(function)
        held.go_on.set()  # the loop comes to it before its next step
        return future

    call(held.hold).result()
    handles = [loop.submit([7, 8], params, sample_index=index) for index in range(4)]
    assert held.waits.wait(HANG_SECONDS)
    transfer.init_weight_transfer()
    monkeypatch.setattr(loop, "call", call_and_go_on)
    transfer.pause()
    assert loop.call(lambda engine: engine.is_paused).result()
    transfer.send_weights(iter(weights))
    transfer.resume()
    rollouts = [handle.future.result(timeout=HANG_SECONDS) for handle in handles]
    assert {len(rollout.token_ids) for rollout in rollouts} == {100}
    assert any(
        [version for version, *_ in each.weight_version_spans] == [0, 1] for each in rollouts
    )
    transfer.destroy()


def test_a_failed_transfer_is_raised_and_nothing_is_served_from_it(
    model: Path, loop: EngineLoop
) -> None:
    transfer = WeightTransfer(loop)
    weights = loop.call(_weights).result()

    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:3]
        raise ConnectionError("the trainer went away")

    transfer.pause()
    with pytest.raises(ConnectionError):
        transfer.send_weights(breaking())
    transfer.resume()
    handle = loop.submit([7, 8], SamplingParams(max_new_tokens=4))
    assert not loop.call(lambda engine: engine.can_run).result()
    assert not handle.future.done()
    transfer.send_weights(iter(weights))
    assert len(handle.future.result(timeout=HANG_SECONDS).token_ids) > 0


def test_the_rest_of_a_failed_transfer_is_taken(model: Path, loop: EngineLoop) -> None:
    """Each tensor may be a collective, in which the trainer's other ranks wait for this one."""
    weights = loop.call(_weights).result()
    weights[3] = (weights[3][0], torch.zeros(1))
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            taken.append(name)
            yield name, tensor

    with pytest.raises(InvalidInputError, match="shape"):
        WeightTransfer(loop).send_weights(tensors())
    assert len(taken) == len(weights)
    loop.close()
    with pytest.raises(EngineStateError, match="closed"):
        WeightTransfer(loop).send_weights(tensors())
    assert len(taken) == 2 * len(weights)


def test_what_is_trained_alone_can_be_sent(loop: EngineLoop) -> None:
    some = loop.call(_weights).result()[2:5]
    with pytest.raises(InvalidInputError, match="model"):
        WeightTransfer(loop).send_weights(iter(some))
    with EngineLoop(small_engine(Path(loop.call(_folder).result()))) as other:
        WeightTransfer(other, partial=True).send_weights(iter(some))
        assert other.call(lambda engine: engine.weight_version).result() == 1


def _folder(engine: Any) -> str:
    return engine.config.model.path


def _weights(engine: Any) -> list[tuple[str, torch.Tensor]]:
    parts = engine.worker.weights.parts["target"].weight_loaders()
    return [(name, loader.read().clone()) for name, loader in parts.items()]


def test_a_failing_reward_is_told_to_the_trainer(
    model: Path, loop: EngineLoop, tmp_path: Path
) -> None:
    def broken(**_: Any) -> list[float]:
        raise ArithmeticError("no reward today")

    args = config(tmp_path, heartbeat_stale_after_s=HANG_SECONDS)
    worker = worker_of(model, loop, args, reward_funcs=broken)
    worker.check_health(HANG_SECONDS)
    worker.start()
    assert worker._failed.wait(timeout=HANG_SECONDS)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no reward today"):
            worker.check_health(HANG_SECONDS)
    worker.stop()
    assert loop.num_unfinished == 0


def test_stop_aborts_what_is_in_flight(model: Path, loop: EngineLoop, tmp_path: Path) -> None:
    args = config(tmp_path, queue_maxsize=4)
    worker = worker_of(model, loop, args)
    worker.update_model_version(3)
    worker.start()
    sample = worker.rollout_buffer.get(timeout=HANG_SECONDS)
    assert sample.model_version == 3
    assert len(sample.old_log_probs) == len(sample.input_ids)
    worker.stop()
    worker.stop()
    assert loop.call(lambda engine: engine.has_unfinished).result() is False
    assert not [each for each in threading.enumerate() if each.name == "trl-rollouts"]


def test_seeds_are_those_of_row_sample_and_turn(
    model: Path, loop: EngineLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a resume nor the order in which conversations end changes them."""
    calls = [{"function": {"name": "unknown", "arguments": {}}}]
    message = {"role": "assistant", "content": "nine", "tool_calls": calls}
    monkeypatch.setattr(async_rollout_worker, "parse_response", lambda *_, **__: message)
    tokenizer = tokenizer_of(model)
    tokenizer.chat_template = tokenizer.chat_template.replace("'system'", "'tool'")
    args = config(tmp_path, max_tool_calling_iterations=1)  # two turns each

    def seeds_by_row(first_row: int, num_rows: int) -> list[set[int]]:
        drawn: dict[tuple[int, ...], set[int]] = defaultdict(set)
        submit = loop.submit

        def watch(prompt_ids: list[int], *rest: Any, request_seed: int) -> Any:
            seeds = drawn[tuple(prompt_ids[:4])]
            if len(seeds) < 8:  # the next epoch draws others
                seeds.add(request_seed)
            return submit(prompt_ids, *rest, request_seed=request_seed)

        worker = worker_of(model, loop, args, processing_class=tokenizer, first_row=first_row)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "submit", watch)
            worker.start()
            wait_until(
                lambda: [len(seeds) for seeds in [*drawn.values()][:num_rows]] == [8] * num_rows,
                lambda: (worker.check_health(HANG_SECONDS), time.sleep(0.005)),
            )
            worker.stop()
        return [*drawn.values()][:num_rows]

    whole = seeds_by_row(0, 4)
    assert len(set().union(*whole)) == 4 * 8
    assert seeds_by_row(2, 2) == whole[2:]


def test_silence_is_told(model: Path, loop: EngineLoop, tmp_path: Path) -> None:
    worker = worker_of(model, loop, config(tmp_path))
    time.sleep(0.02)
    with pytest.raises(RuntimeError, match="said nothing"):
        worker.check_health(0.01)
    assert isinstance(worker.metrics_queue, queue.Queue)


def test_a_clock_that_is_set_on_is_no_silence(
    model: Path, loop: EngineLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(model, loop, config(tmp_path))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    worker.check_health(3600)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"token_budget": None}, "token_budget"), ({"temperature": 0.0}, "temperature")],
)
def test_what_cannot_be_honoured_is_refused_when_the_worker_is_made(
    model: Path, loop: EngineLoop, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    args = SimpleNamespace(**vars(config(tmp_path)) | options)
    with pytest.raises(InvalidInputError, match=field):
        worker_of(model, loop, args)
    with pytest.raises(InvalidInputError, match="mode"):
        WeightTransfer(loop, mode="abort")
    worker = worker_of(model, loop, config(tmp_path, max_inflight_tasks=-1))
    with pytest.raises(InvalidInputError, match="max_inflight_tasks"):
        worker.start()
