"""A small dataset job."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.offline import RunConfig
from tests.helpers.small_jobs import PARAMS, PROMPTS, small_job


@pytest.fixture
def config(text_model_path: Path, tmp_path: Path) -> RunConfig:
    return small_job(text_model_path, tmp_path, PROMPTS, PARAMS)
