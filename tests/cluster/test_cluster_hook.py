"""A trainer's hook brings its weights to all replicas."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutEngine
from rollout.trainers import RolloutHook
from tests.cluster.workload import drain, ngram, rejoined, submit_all


def test_after_a_step_all_replicas_generate_with_the_new_weights(config, make_cluster):
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    engine = RolloutEngine.from_config(config, ngram())
    cluster, pool = make_cluster(2)
    hooks = [RolloutHook(engine, model), RolloutHook(cluster, model)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    syncs = [hook.sync() for hook in hooks]
    assert [sync.version for sync in syncs] == [1, 1]
    assert cluster.weights_digest() == engine.weights_digest()
    for each in (engine, cluster):
        submit_all(each)
    assert drain(cluster) == drain(engine)
    pool.living["replica-1"].kill()
    submit_all(cluster)
    submit_all(engine)
    found = drain(cluster)
    rejoined(cluster)
    assert found == drain(engine)
    assert cluster.weights_digest() == engine.weights_digest()
