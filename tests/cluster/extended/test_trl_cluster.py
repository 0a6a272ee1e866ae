"""TRL's own trainers with replicas in place of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("trl")

from transformers import TrainerCallback

from rollout.cluster.cluster import RolloutCluster
from tests.cluster.ray_processes import replica_processes, wait_until_gone
from tests.cluster.workload import poll_until
from tests.helpers.text_model import save_text_model
from tests.helpers.trl_runs import assert_same_run, by_generation, engine_of, run

pytestmark = [
    pytest.mark.usefixtures("own_ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


class KillOneReplica(TrainerCallback):
    """After the first step; its place is taken with the weights of a later one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            replica_processes()[0].kill()


def test_replicas_give_the_run_of_one_engine_and_have_its_weights(tmp_path: Path) -> None:
    model = save_text_model(tmp_path / "model")
    one = by_generation(model, tmp_path / "one", temperature=0.9)
    expected = run(one)  # before the other is made, which seeds torch anew
    ours = {"cluster": "ray", "cluster_options": {"replicas": 2, "num_cpus": 1}}
    many = by_generation(model, tmp_path / "many", ours=ours, temperature=0.9)
    cluster = engine_of(many)
    try:
        assert isinstance(cluster, RolloutCluster)
        many.add_callback(KillOneReplica())
        assert_same_run(expected, run(many))
        poll_until(cluster, lambda: cluster.replicas.all_joined)
        assert cluster.weight_version == engine_of(one).weight_version == 3
        assert cluster.weights_digest() == engine_of(one).weights_digest()
    finally:
        left = replica_processes()
        cluster.close()
    wait_until_gone(left)
