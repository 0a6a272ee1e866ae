"""The model that trainers with a tokenizer are tested with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(text_model_path: Path) -> Path:
    """The folder of a tiny random model that reads text. Tests only read it."""
    return text_model_path
