"""How many replicas, with what each, and what is refused."""

from __future__ import annotations

import sys

import pytest

from rollout import RolloutEngine
from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import ParallelConfig, ParallelMode
from rollout.errors import InvalidInputError
from rollout.open_engine import open_pretrained, open_with
from tests.cluster.workload import ngram


def test_without_ray_the_error_says_how_to_get_it(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "rollout.cluster.ray.pool", None)  # as if it could not import
    with pytest.raises(InvalidInputError, match=r"pip install 'specrollout\[ray\]'"):
        open_with(config, ngram(), ClusterConfig(kind=ClusterKind.ray))


def test_values_that_make_no_sense_are_refused():
    for field, value in (
        ("replicas", 0), ("num_cpus", 0), ("num_gpus", -1), ("start_seconds", 0),
        ("report_seconds", 0), ("heartbeat_seconds", 0.0), ("stall_seconds", -1.0),
        ("max_deaths", 0), ("max_deaths_per_request", 0),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match=f"cluster.{field}"):
            ClusterConfig(kind=ClusterKind.ray, **{field: value})


def test_what_a_program_asks_for_is_checked_before_anything_starts(tiny_model_path):
    tensor, lockstep = {"mode": "tensor", "size": 2}, {"mode": "lockstep", "size": 2}
    for options, message in (
        ({"cluster": "docker"}, "cluster='docker': must be one of none, ray"),
        (
            {"cluster": "ray", "cluster_options": {"replica": 2}},
            r"cluster_options\['replica'\]=2: unknown; there are replicas, ",
        ),
        ({"cluster_options": {"replicas": 2}}, "cluster=ray"),
        ({"max_runing": 2}, "max_runing"),
        ({"spec_options": {"draft": 2}}, "spec.draft"),
        (
            {"cluster": "ray", "parallel": {"mode": "tensor", "size": 4}},
            "parallel.size=4: must divide the model's 6 query heads",
        ),
        ({"cluster": "ray", "parallel": lockstep}, "parallel.mode='lockstep'"),
        (
            {"cluster": "ray", "cluster_options": {"num_gpus": 0.5}, "parallel": tensor},
            "cluster.num_gpus=0.5: must be 0, or 1 or more with parallel.size=2",
        ),
    ):
        with pytest.raises(InvalidInputError, match=message):
            open_pretrained(str(tiny_model_path), **options)


def test_without_a_cluster_a_program_gets_an_engine_and_keeps_its_ranks(tiny_model_path):
    engine = open_pretrained(str(tiny_model_path), "none", max_running=3, max_kv_tokens=512)
    assert isinstance(engine, RolloutEngine)
    assert engine.config.scheduler.max_running == 3
    tensor = ParallelConfig(mode=ParallelMode.tensor, size=2)
    assert ClusterConfig(kind=ClusterKind.ray).own_ranks(tensor).size == 1
    assert ClusterConfig().own_ranks(tensor) is tensor


def test_each_process_has_its_share():
    pytest.importorskip("ray")
    from rollout.cluster.ray.instance import process_resources

    for options, device, there, nodes, ranks, expected in (
        ({"replicas": 4}, "cpu", {"CPU": 16}, 1, 1, (4, 0.0, 0.25)),
        ({"replicas": 4}, "cpu", {"CPU": 2}, 1, 1, (1, 0.0, 0.25)),
        ({"replicas": 4}, "cpu", {"CPU": 64}, 2, 1, (16, 0.0, 0.5)),
        ({"replicas": 4}, "cpu", {"CPU": 64}, 2, 2, (8, 0.0, 0.125)),
        ({"replicas": 4, "num_cpus": 2}, "auto", {"CPU": 64, "GPU": 8}, 1, 1, (2, 1.0, 1.0)),
        ({"replicas": 4}, "auto", {"CPU": 64, "GPU": 2}, 1, 1, (16, 0.0, 0.25)),
        ({"replicas": 4}, "auto", {"CPU": 64, "GPU": 2}, 1, 2, (8, 1.0, 1.0)),
        ({"replicas": 4}, "cuda", {"CPU": 64, "GPU": 2}, 1, 1, (16, 1.0, 1.0)),
        ({"replicas": 2, "num_gpus": 0.5}, "cuda", {"CPU": 8, "GPU": 1}, 1, 1, (4, 0.5, 0.5)),
        ({"replicas": 2, "num_gpus": 0}, "auto", {"CPU": 8, "GPU": 2}, 1, 1, (4, 0.0, 0.5)),
    ):
        settings = ClusterConfig(kind=ClusterKind.ray, **options)
        found = process_resources(settings, device, there, nodes, ranks)
        assert (found.num_cpus, found.num_gpus, found.memory_share) == expected, options
