"""Every option of every group composes, and what is composed is checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from rollout.cluster.config import ClusterConfig, ClusterKind
from rollout.config import EngineConfig
from rollout.engine.worker_factory import factory_of, worker_factory
from rollout.errors import InvalidInputError
from rollout.offline import OnError, RunConfig
from rollout.offline.hydra_config import checked_config, register_schema
from rollout.types import SamplingParams

CONF = Path(__file__).parents[2] / "conf"
GROUPS = ("model", "data", "sampling", "spec", "cluster", "parallel", "experiment")
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
EAGLE = {
    "eagle": ["spec.draft_path=drafts/mine"]
}  # of which nothing is looked at before it is built
REQUIRED = ["model.path=m", "data.path=p.jsonl", "output.path=o.jsonl"]


@pytest.fixture(autouse=True)
def composing() -> Iterator[None]:
    register_schema("run_schema", RunConfig)
    with initialize_config_module("rollout.conf", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def composed(*overrides: str) -> RunConfig:
    config = compose("config", overrides=[*REQUIRED, *overrides])
    return checked_config(config, RunConfig, "specrollout")


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    config = composed(f"{group}={option}", *EAGLE.get(option, ()))
    assert isinstance(config, RunConfig)
    assert isinstance(config.engine, EngineConfig)
    assert callable(factory_of(config.spec))


def uncommented_keys(text: str) -> list[str]:
    """Keys with a value that have no comment behind them, nor one in the line above."""
    keys, above = [], ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        is_leaf = key.strip().isidentifier() and value.partition(" #")[0].strip()
        if is_leaf and " # " not in value and not above.strip().startswith("# "):
            keys.append(key.strip())
        above = line
    return keys


def test_a_key_without_a_comment_is_found() -> None:
    text = "# of one\none: 1\ntwo: 2\nthree: {} # three\n\ngroup:\n  four: 4\n# five\n\nfive: x\n"
    assert uncommented_keys(text) == ["two", "four", "five"]


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONF.rglob("*.yaml")) if "hydra" not in path.parts],
    ids=lambda path: str(path.relative_to(CONF)),
)
def test_every_key_has_a_comment(path: Path) -> None:
    assert uncommented_keys(path.read_text()) == []


def test_the_defaults_are_the_dataclasses_own() -> None:
    config = composed()
    assert config.sampling == SamplingParams()
    assert config.engine == EngineConfig(model=config.model)
    assert config.data.on_error is OnError.stop
    assert config.cluster == ClusterConfig()
    assert composed("cluster=ray").cluster == ClusterConfig(kind=ClusterKind.ray)


def test_an_experiment_sets_anything_and_the_command_line_wins() -> None:
    composed_demo = compose("config", overrides=["experiment=demo", "sampling.n=3"])
    config = checked_config(composed_demo, RunConfig, "specrollout")
    assert config.model.path == "models/SmolLM2-135M-Instruct"
    assert config.data.path == "runs/demo/prompts.jsonl"
    assert config.output.path == "runs/demo/rollouts.jsonl"
    assert config.sampling.n == 3
    assert config.sampling.temperature != SamplingParams().temperature


def test_values_of_every_kind_reach_the_dataclasses() -> None:
    config = composed(
        "+sampling.logit_bias={5: -1.5, 7: 2}",
        'sampling.stop=["\n\n", "a,b"]',
        "sampling.stop_token_ids=[1,2]",
        "sampling.seed=18446744073709551615",
        "data.columns=[answer,id]",
        "data.on_error=skip",
        "data.limit=3",
        "memory.kv_bytes=1000000",
        "exact=false",
        "num_threads=2",
        "spec.num_draft_tokens=4",
        "spec.corpus_path=epoch1.jsonl.corpus",
        "+spec.external_corpora.code=code.jsonl",
        "+spec.external_corpora.notes=notes.jsonl",
    )
    assert config.sampling.logit_bias == {5: -1.5, 7: 2.0}
    assert config.sampling.stop == ["\n\n", "a,b"]
    assert config.sampling.stop_token_ids == [1, 2]
    assert config.sampling.seed == 2**64 - 1
    assert config.data.columns == ["answer", "id"]
    assert config.data.on_error is OnError.skip
    assert config.engine.memory.kv_bytes == 1_000_000
    assert (config.engine.exact, config.engine.num_threads) == (False, 2)
    assert config.spec["num_draft_tokens"] == 4
    assert config.spec["corpus_path"] == "epoch1.jsonl.corpus"
    assert config.spec["external_corpora"] == {"code": "code.jsonl", "notes": "notes.jsonl"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.temperature=-0.1", r"sampling.temperature=-0.1: must be a finite number >= 0"),
        ("sampling.temperature=nan", r"sampling.temperature=nan: must be a finite number >= 0"),
        ("sampling.top_p=0", r"sampling.top_p=0.0: must be in \(0, 1\]"),
        ("sampling.n=0", r"sampling.n=0: must be >= 1"),
        ("data.limit=0", r"data.limit=0: must be >= 1"),
        ("data.path=p.csv", r"data.path='p.csv': must end in"),
        ("output.path=o.txt", r"output.path='o.txt': must end in"),
        ("output.sync_seconds=-1", r"output.sync_seconds=-1.0: must be >= 0"),
        ("output.corpus_seconds=-1", r"output.corpus_seconds=-1.0: must be >= 0; 0 is never"),
        ("log.every=0", r"log.every=0: must be >= 1"),
        ("log.seconds=0", r"log.seconds=0.0: must be > 0"),
        ("memory.kv_fraction=1", r"memory.kv_fraction=1.0: must be in"),
        ("scheduler.max_running=0", r"scheduler.max_running=0: must be an integer >= 1"),
        (
            "+sampling.top_q=1",
            r"sampling.top_q=1: no such key, did you mean top_p\?; there are temperature, ",
        ),
        ("+outputs.path=x", r"outputs=.*: no such key, did you mean output\?"),
        ("data.path=???", r"data.path=None: must be given, for example data.path=prompts.jsonl"),
    ],
)
def test_wrong_values_are_named(override: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        composed(override)


@pytest.mark.parametrize("spec", ["eagle", "hybrid", "mtp", "ngram", "none"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_options_a_spec_has_not_are_named(spec: str, plus: str) -> None:
    config = composed(f"spec={spec}", f"{plus}spec.draftpath=x")
    with pytest.raises(InvalidInputError, match=r"spec.draftpath='x': spec_workers.* knows "):
        factory_of(config.spec)


@pytest.mark.parametrize("override", ["sampling.n=abc", "samplng.n=3", "data.on_error=shrug"])
def test_wrong_names_and_types_do_not_compose(override: str) -> None:
    with pytest.raises(HydraException):
        composed(override)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"_target_": "spec_workers.ngram.build", "num_draft_token": 1},
            r"spec.num_draft_token=1: .*\. Did you mean num_draft_tokens\?",
        ),
        (
            {"_target_": "spec_workers.ngram.build", "num_draft_tokens": -1},
            r"spec.num_draft_tokens=-1: must be an integer from 0 to 63",
        ),
        (
            {"_target_": "spec_workers.hybrid.build", "budget": "learnt"},
            r"spec.budget='learnt': must be one of learned, fixed, did you mean learned\?",
        ),
        ({"_target_": "spec_workers.eagle.build"}, r"spec.draft_path=None: must name the folder"),
        ({"_target_": "nowhere.build"}, r"spec._target_='nowhere.build': cannot be imported"),
        ({}, r"spec._target_=None: cannot be imported"),
        (
            {"_target_": "spec_workers.ngram.build", "nonsense": 1},
            r"spec.nonsense=1: spec_workers.ngram.build knows num_draft_tokens, ",
        ),
        ({"_target_": "spec_workers.none.build", "x": 1}, r"spec.x=1: .* knows no options"),
    ],
)
def test_a_wrong_spec_is_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        factory_of(spec)


def test_every_key_of_the_schema_is_in_the_composed_configuration() -> None:
    config = compose("config", overrides=REQUIRED)
    missing = OmegaConf.missing_keys(config)
    assert missing == set()
    assert set(config) == set(RunConfig.__dataclass_fields__)


def test_a_source_tree_that_is_not_installed_has_its_specs(monkeypatch) -> None:
    """conf/ is a part of the package only where that is installed."""

    def files(package: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}")

    installed = worker_factory("ngram")
    monkeypatch.setattr("rollout.engine.worker_factory.files", files)
    bare = worker_factory("ngram")
    assert (bare.func, bare.keywords) == (installed.func, installed.keywords)
    with pytest.raises(InvalidInputError, match="none"):
        worker_factory("nothing")
