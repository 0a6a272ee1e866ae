"""AsyncGRPOTrainer with our rollout worker and weight transfer."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
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
    packing,
)

from rollout import SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import engine_config
from rollout.engine.engine_loop import EngineLoop
from rollout.engine.worker_factory import worker_factory
from rollout.errors import InvalidInputError
from rollout.trainers.trl.async_grpo import RolloutWorker, WeightTransfer
from tests.cluster.thread_pool import ThreadPool
from tests.helpers.hang import HANG_SECONDS, wait_until
from tests.helpers.trl_runs import WordReward, conversations, small_engine, spec_options

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant> ",
    "fields": {"content": {"close_pattern": r"</s>|$", "content": "text"}},
}


def tree_attention(
    q: torch.Tensor,  # [T, heads, D]
    k: torch.Tensor,  # [S, kv_heads, D]
    v: torch.Tensor,
    q_offsets: torch.Tensor,
    kv_offsets: torch.Tensor,
    *_: object,
    softmax_scale: float,
    **__: object,
) -> torch.Tensor:
    """A substitute for the trainer's GPU kernel. A segment's rows are the last of its keys."""
    parts = []
    for index in range(len(q_offsets) - 1):
        rows, keys = (slice(*each[index : index + 2]) for each in (q_offsets, kv_offsets))
        part = q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1)
        sizes = part[0].shape[1], part[1].shape[1]
        mask = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
        given = scaled_dot_product_attention(*part, mask, scale=softmax_scale, enable_gqa=True)
        parts.append(given.transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(flash_attn_varlen_func=tree_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernel)
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


def test_a_run_with_replicas(model: Path, tmp_path: Path) -> None:
    settings = engine_config(str(model), {"dtype": "float32", "kv_fraction": 0.1})
    names = ["replica-0", "replica-1"]
    pool = ThreadPool(settings, worker_factory("ngram", **spec_options("ngram")), names)
    cluster = RolloutCluster(settings, ClusterConfig(kind=ClusterKind.ray, replicas=2), pool)
    args, reward, tokenizer = config(tmp_path), WordReward(), tokenizer_of(model)
    with closing(cluster), EngineLoop(cluster) as loop:
        trainer = AsyncGRPOTrainer(
            model=str(model),
            reward_funcs=reward,
            args=args,
            train_dataset=conversations(),
            processing_class=tokenizer,
            rollout_worker=worker_of(model, loop, args, reward_funcs=reward),
            weight_transfer=WeightTransfer(loop, mode="retract"),
        )
        trainer.train()
        # One sync before the first rollout, one after each step; and all of them arrived.
        assert trainer.model_version == 5
        assert loop.call(lambda engine: engine.weight_version).result() == 5
        served = loop.call(lambda each: each.get_weights_by_name("lm_head.weight", 100)).result()
        assert served == trainer.model.lm_head.weight.flatten()[:100].tolist()
        assert loop.call(lambda engine: engine.weights_digest()).result()
        assert loop.num_unfinished == 0
        loop.call(lambda engine: engine.check_integrity()).result()
    steps = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(steps) == 4
    fresh = [step for step in steps if step["sample/staleness_max"] == 0]
    assert fresh[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert fresh[0]["kl"] < 1e-7
    assert any("rollout/accept_length" in step for step in steps)


class Echo:
    """An environment that adds to the prompt and knows the reward itself."""

    def reset(self, **_: Any) -> str:
        return " nine"

    def get_reward(self) -> float:
        return 0.5


def test_samples_are_of_the_environment_and_stop_aborts_what_is_in_flight(
    model: Path, loop: EngineLoop, tmp_path: Path
) -> None:
    args = config(tmp_path, queue_maxsize=4)
    worker = worker_of(model, loop, args, reward_funcs=[], environment_factory=Echo)
    worker.update_model_version(3)
    worker.start()
    sample = worker.rollout_buffer.get(timeout=HANG_SECONDS)
    assert sample.prompt[-1]["content"].endswith(" nine")
    assert sample.metrics["rewards/Echo"] == 0.5
    assert sample.model_version == 3
    assert len(sample.old_log_probs) == len(sample.input_ids)
    worker.stop()
    worker.stop()
    assert loop.call(lambda engine: engine.has_unfinished).result() is False
    assert not [each for each in threading.enumerate() if each.name == "trl-rollouts"]


def test_a_failed_transfer_is_raised_and_nothing_is_served_from_it(
    model: Path, loop: EngineLoop
) -> None:
    transfer = WeightTransfer(loop)
    weights = loop.call(_weights).result()
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(weights):
            taken.append(name)
            yield name, torch.zeros(1) if index == 3 else tensor

    transfer.pause()
    with pytest.raises(InvalidInputError, match="shape"):
        transfer.send_weights(tensors())
    # Each may be a collective, in which the trainer's other ranks wait for this one.
    assert len(taken) == len(weights)
    transfer.resume()
    handle = loop.submit([7, 8], SamplingParams(max_new_tokens=4))
    assert not loop.call(lambda engine: engine.can_run).result()
    assert not handle.future.done()
    transfer.send_weights(iter(weights))
    assert len(handle.future.result(timeout=HANG_SECONDS).token_ids) > 0


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
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "trl-rollouts"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no reward today"):
            worker.check_health(HANG_SECONDS)
    worker.stop()
    assert loop.num_unfinished == 0


def test_seeds_are_those_of_row_and_sample(
    model: Path, loop: EngineLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a resume nor the order in which conversations end changes them."""
    args = config(tmp_path)

    def seeds_by_row(first_row: int, num_rows: int) -> list[set[int]]:
        drawn: dict[tuple[int, ...], set[int]] = defaultdict(set)
        submit = loop.submit

        def watch(prompt_ids: list[int], *rest: Any, request_seed: int) -> Any:
            seeds = drawn[tuple(prompt_ids[:4])]
            if len(seeds) < 4:  # the next epoch draws others
                seeds.add(request_seed)
            return submit(prompt_ids, *rest, request_seed=request_seed)

        worker = worker_of(model, loop, args, first_row=first_row)
        with monkeypatch.context() as patch:
            patch.setattr(loop, "submit", watch)
            worker.start()
            wait_until(
                lambda: [len(seeds) for seeds in [*drawn.values()][:num_rows]] == [4] * num_rows,
                lambda: (worker.check_health(HANG_SECONDS), time.sleep(0.005)),
            )
            worker.stop()
        return [*drawn.values()][:num_rows]

    whole = seeds_by_row(0, 4)
    assert len(set().union(*whole)) == 4 * 4
    assert seeds_by_row(2, 2) == whole[2:]


def test_what_cannot_be_honoured_is_refused(model: Path, loop: EngineLoop, tmp_path: Path) -> None:
    for options in ({"token_budget": None}, {"temperature": 0.0}):
        args = SimpleNamespace(**vars(config(tmp_path)) | options)
        with pytest.raises(InvalidInputError, match=next(iter(options))):
            worker_of(model, loop, args)
    with pytest.raises(InvalidInputError, match="mode"):
        WeightTransfer(loop, mode="abort")
    worker = worker_of(model, loop, config(tmp_path, max_inflight_tasks=-1))
    with pytest.raises(InvalidInputError, match="max_inflight_tasks"):
        worker.start()
