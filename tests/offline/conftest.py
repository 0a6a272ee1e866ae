"""A small dataset job."""

from __future__ import annotations

import pytest

from tests.helpers.small_jobs import PARAMS, PROMPTS, small_job


@pytest.fixture
def config(text_model_path, tmp_path):
    return small_job(text_model_path, tmp_path, PROMPTS, PARAMS)
