from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rollout import Rollout, RolloutEngine
from rollout.config import DType
from rollout.models.loader import load_model
from spec_workers.draft_training.engine_draft import DraftSwap
from spec_workers.draft_training.sequences import TokenSequence, read_rollouts
from tests.helpers.draft_training import (
    GREEDY,
    PARAMS,
    PROMPTS,
    VOCAB,
    accept_length,
    drafting_engine,
)
from tests.helpers.tiny_draft import save_tiny_eagle3
from tests.helpers.tiny_model import save_tiny_llama


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few tokens, so that there is something to learn in a few steps."""
    folder = tmp_path_factory.mktemp("target")
    return save_tiny_llama(folder, vocab_size=VOCAB, num_layers=7, hidden_size=32, num_heads=4)


@pytest.fixture(scope="module")
def target(target_path: Path):
    return load_model(target_path, DType.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def rollouts_path(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own greedy text, as the offline job writes it."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB, (int(length),), generator=generator).tolist()
        for length in torch.randint(2, 9, (60,), generator=generator)
    ]
    engine = RolloutEngine.from_pretrained(target_path, spec="none")
    rollouts = engine.generate(prompts, GREEDY)
    engine.close()
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    rows = [
        {"prompt_ids": prompt, "token_ids": rollout.token_ids}
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rollouts(rollouts_path: Path) -> list[TokenSequence]:
    return read_rollouts([rollouts_path], VOCAB, 512)


@dataclass(frozen=True)
class Setting:
    engine: RolloutEngine  # it rolled PROMPTS out, which its ring holds
    target: Path
    draft: Path
    first: dict[str, torch.Tensor]  # the draft's weights
    rollouts: list[Rollout]
    accept_length: float  # of other prompts


@pytest.fixture(scope="module")
def setting(tmp_path_factory) -> Setting:
    target = save_tiny_llama(tmp_path_factory.mktemp("target"))
    draft = save_tiny_eagle3(
        tmp_path_factory.mktemp("draft"), target, draft_vocab_size=80, intermediate_size=64
    )
    engine = drafting_engine(target, draft)
    rollouts, first = engine.generate(PROMPTS, PARAMS), DraftSwap(engine).read()
    recorder, engine.worker.recorder = engine.worker.recorder, None
    length = accept_length(engine)
    engine.worker.recorder = recorder
    return Setting(engine, target, draft, first, rollouts, length)


@pytest.fixture
def engine(setting) -> Iterator[RolloutEngine]:
    engine = setting.engine
    if engine.weight_version:
        engine.update_weights_from_disk(setting.target, selector="target")
        engine.update_weights_from_disk(setting.target, selector="target", weight_version=0)
    engine.update_weights_from_tensor(setting.first, selector="draft", weight_version=0)
    yield engine
    engine.check_integrity()
