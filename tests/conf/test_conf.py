"""Every option of every group composes, and what is composed is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig
from rollout.engine.worker_factory import factory_of
from rollout.errors import InvalidInputError
from rollout.offline import OnError, RunConfig
from rollout.offline.hydra_config import checked_config, register_schema
from rollout.types import SamplingParams

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ("model", "data", "sampling", "spec", "cluster", "parallel", "experiment")
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
DRAFTS = ("eagle", "block")
PATH = "spec.draft_path=drafts/mine"  # looked at when they are built
REQUIRED = ["model.path=m", "data.path=p.jsonl", "output.path=o.jsonl"]


@pytest.fixture(autouse=True)
def composing():
    register_schema("run_schema", RunConfig)
    with initialize_config_module("rollout.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def composed(*overrides: str) -> RunConfig:
    config = compose("config", overrides=[*REQUIRED, *overrides])
    return checked_config(config, RunConfig, "specrollout")


def test_every_option_composes():
    for group, option in OPTIONS:
        config = composed(f"{group}={option}", *([PATH] if option in DRAFTS else []))
        assert isinstance(config.engine, EngineConfig), option
        assert callable(factory_of(config.spec))


def test_the_defaults_are_the_dataclasses_own():
    config = composed()
    assert config.sampling == SamplingParams()
    assert config.engine == EngineConfig(model=config.model)
    assert config.data.on_error is OnError.stop
    assert config.cluster == ClusterConfig()
    assert composed("cluster=ray").cluster == ClusterConfig(kind=ClusterKind.ray)
    all_keys = compose("config", overrides=REQUIRED)
    assert OmegaConf.missing_keys(all_keys) == set()
    assert set(all_keys) == set(RunConfig.__dataclass_fields__)


def test_an_experiment_sets_anything_and_the_command_line_wins():
    composed_demo = compose("config", overrides=["experiment=demo", "sampling.n=3"])
    config = checked_config(composed_demo, RunConfig, "specrollout")
    assert config.model.path == "models/SmolLM2-135M-Instruct"
    assert config.output.path == "runs/demo/rollouts.jsonl"
    assert config.sampling.n == 3
    assert config.sampling.temperature != SamplingParams().temperature


def test_values_of_every_kind_reach_the_dataclasses():
    config = composed(
        "+sampling.logit_bias={5: -1.5, 7: 2}",
        'sampling.stop=["\n\n", "a,b"]',
        "sampling.seed=18446744073709551615",
        "data.columns=[answer,id]",
        "data.on_error=skip",
        "memory.kv_bytes=1000000",
        "exact=false",
        "spec.num_draft_tokens=4",
        "+spec.external_corpora.code=code.jsonl",
    )
    assert config.sampling.logit_bias == {5: -1.5, 7: 2.0}
    assert config.sampling.stop == ["\n\n", "a,b"]
    assert config.sampling.seed == 2**64 - 1
    assert config.data.columns == ["answer", "id"]
    assert config.data.on_error is OnError.skip
    assert config.engine.memory.kv_bytes == 1_000_000
    assert config.engine.exact is False
    assert config.spec["num_draft_tokens"] == 4
    assert config.spec["external_corpora"] == {"code": "code.jsonl"}


WRONG = (
    ("sampling.top_p=0", r"sampling.top_p=0.0: must be in"),
    ("data.limit=0", "data.limit=0: must be >= 1"),
    ("data.path=p.csv", r"data.path='p.csv': must end in"),
    ("data.path=???", r"data.path=None: must be given, for example data.path=prompts.jsonl"),
    ("output.path=o.txt", r"output.path='o.txt': must end in"),
    ("output.sync_seconds=-1", r"output.sync_seconds=-1.0: must be >= 0"),
    ("output.corpus_seconds=-1", r"output.corpus_seconds=-1.0: must be >= 0; 0 is never"),
    ("log.every=0", "log.every=0: must be >= 1"),
    ("log.seconds=0", r"log.seconds=0.0: must be > 0"),
    ("memory.kv_fraction=1", r"memory.kv_fraction=1.0: must be in"),
    ("scheduler.max_running=0", "scheduler.max_running=0: must be an integer >= 1"),
    ("+sampling.top_q=1", r"sampling.top_q=1: no such key, did you mean top_p\?; there are"),
    ("+outputs.path=x", r"outputs=.*: no such key, did you mean output\?"),
)
SPECS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"_target_": "spec_workers.ngram.build", "num_draft_token": 1}, r"mean num_draft_tokens\?"),
    ({"_target_": "spec_workers.ngram.build", "num_draft_tokens": -1}, r"-1: must be an integer"),
    ({"_target_": "spec_workers.hybrid.build", "budget": "learnt"}, r"did you mean learned\?"),
    ({"_target_": "spec_workers.eagle.build"}, r"spec.draft_path=None: must name the folder"),
    ({"_target_": "nowhere.build"}, r"spec._target_='nowhere.build': cannot be imported"),
    ({}, r"spec._target_=None: cannot be imported"),
    ({"_target_": "spec_workers.none.build", "x": 1}, r"spec.x=1: spec=none knows no options"),
)


def test_wrong_values_are_named():
    for override, message in WRONG:
        with pytest.raises(InvalidInputError, match=message):
            composed(override)
    for override in ("sampling.n=abc", "samplng.n=3", "data.on_error=shrug"):
        with pytest.raises(HydraException):
            composed(override)
    for spec, message in SPECS:
        with pytest.raises(InvalidInputError, match=message):
            factory_of(spec)
    for spec in ("block", "eagle", "hybrid", "mtp", "ngram", "none"):
        config = composed(f"spec={spec}", "+spec.draftpath=x")
        with pytest.raises(InvalidInputError, match=r"spec.draftpath='x': spec=\w+ knows "):
            factory_of(config.spec)
