"""Three policies of one tiny model: the one an engine starts with, and two to send to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine, SamplingParams, WeightUpdateError
from tests.helpers.tiny_model import save_tiny_llama

PROMPTS = [[5, 9, 11, 3, 70], [1, 2, 3]]
PARAMS = SamplingParams(max_new_tokens=12, seed=4, ignore_eos=True)


@dataclass(frozen=True)
class Policy:
    folder: Path
    tensors: dict[str, torch.Tensor]
    digest: str
    outputs: list[list[int]]


def outputs(engine: RolloutEngine) -> list[list[int]]:
    return [rollout.token_ids for rollout in engine.generate(PROMPTS, PARAMS)]


def assert_serves(engine: RolloutEngine, policy: Policy) -> None:
    assert engine.can_run
    assert engine.weights_digest() == policy.digest
    assert outputs(engine) == policy.outputs


def assert_refuses(engine: RolloutEngine) -> None:
    assert not engine.can_run
    assert "torn" in engine.unavailable_reason
    with pytest.raises(WeightUpdateError, match="torn"):
        outputs(engine)


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Policy]:
    found = []
    for seed in range(3):
        folder = save_tiny_llama(tmp_path_factory.mktemp(f"policy-{seed}"), seed=seed)
        engine = RolloutEngine.from_pretrained(folder, spec="none")
        tensors = load_file(folder / "model.safetensors")
        found.append(Policy(folder, tensors, engine.weights_digest(), outputs(engine)))
    assert len({policy.digest for policy in found}) == 3
    return found


@pytest.fixture(scope="session")
def shared_engine(policies: list[Policy]) -> RolloutEngine:
    return RolloutEngine.from_pretrained(policies[0].folder, max_running=4)


@pytest.fixture
def engine(shared_engine: RolloutEngine, policies: list[Policy]) -> Iterator[RolloutEngine]:
    """An engine that serves the first policy as version 0; its books balance at the end."""
    shared_engine.abandon_weight_update()
    if shared_engine.weight_version == 0:  # a version is never followed by itself
        shared_engine.update_weights_from_tensor(policies[0].tensors.items())
    shared_engine.update_weights_from_tensor(
        policies[0].tensors.items(), weight_version=0, abort_all_requests=True
    )
    shared_engine.step()
    yield shared_engine
    shared_engine.check_integrity()
