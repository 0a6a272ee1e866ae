"""Requests for clusters, and the parts of their rollouts that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollout import Rollout, SamplingParams
from rollout.cluster.cluster import RolloutCluster
from rollout.engine.protocol import Engine
from rollout.engine.worker_factory import WorkerFactory, worker_factory
from tests.helpers.hang import wait_until

PARAMS = SamplingParams(temperature=0.9, max_new_tokens=24, seed=5, n=4, entropy=True)
PROMPTS = [[3 + i % 7, 10 + i, 11] for i in range(7)]


def ngram() -> WorkerFactory:
    return worker_factory("ngram", corpus_bytes=1 << 20)


def always_drafts(spec: str = "ngram") -> WorkerFactory:
    """A worker that drafts in every step, although a tiny model decodes too fast for drafts to
    pay."""
    options = {"budget": "fixed", "calibration_seconds": 0, "corpus_bytes": 1 << 20}
    return worker_factory(spec, **(options if spec == "ngram" else {}))


def submit_all(
    engine: Engine, prompts: Sequence[list[int]] = PROMPTS, params: SamplingParams = PARAMS
) -> None:
    for index, prompt in enumerate(prompts):
        for sample in range(params.n):
            engine.submit(prompt, params, prompt_index=index, sample_index=sample)


def key(rollout: Rollout) -> tuple[int, int]:
    return rollout.prompt_index, rollout.sample_index


def content(rollout: Rollout) -> tuple[Any, ...]:
    return (
        rollout.token_ids, rollout.logprobs, rollout.weight_versions, rollout.extras, rollout.text,
        rollout.finish_reason, rollout.seed, rollout.prompt_ids, rollout.error,
    )  # fmt: skip


def rejoined(cluster: RolloutCluster) -> None:
    """Let the cluster step until it has all its replicas."""
    wait_until(lambda: cluster.replicas.all_joined, cluster.step)


def poll_until(cluster: RolloutCluster, reached: Callable[[], object]) -> None:
    """Wait without a step."""
    wait_until(reached, lambda: cluster.replicas.poll(0.01))


def drain(engine: Engine, between: Callable[[], object] = lambda: None) -> dict[Any, Any]:
    """Content by key, each once. ``between`` is called between two steps."""
    found: dict[Any, Any] = {}
    while engine.has_unfinished:
        for rollout in engine.step():
            assert key(rollout) not in found, "a rollout twice"
            found[key(rollout)] = content(rollout)
        between()
    return found


def generated(
    engine: Engine, prompts: Sequence[list[int]] = PROMPTS, params: SamplingParams = PARAMS
) -> dict[Any, Any]:
    """The rollouts of an engine or a cluster."""
    submit_all(engine, prompts, params)
    return drain(engine)
