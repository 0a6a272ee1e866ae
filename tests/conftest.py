"""Shared by all tests: the demo model's folder, tiny random models, balanced books, GPU marks."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout import RolloutEngine
from tests.helpers.text_model import save_text_model
from tests.helpers.tiny_model import save_tiny_llama

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a missing folder's name is not looked up

HERE = Path(__file__).parent
DEMO_MODEL = HERE.parent / "models" / "SmolLM2-135M-Instruct"
GPU_FOLDERS = tuple(f"{HERE / name}{os.sep}" for name in ("device", "gpu", "ops/extended/triton"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Enter folders named `extended` only where an argument names one."""
    is_extended = collection_path.name == "extended"
    named = any("extended" in Path(each.partition("::")[0]).parts for each in config.args)
    return True if is_extended and not named else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a GPU, unless Triton's interpreter stands in for one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if str(item.path).startswith(GPU_FOLDERS):
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish() -> None:
    """Leave the modules and the tests themselves, a million objects, out of garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # what ends with the process is looked at again


@pytest.fixture(scope="module", autouse=True)
def _freed_memory() -> Iterator[None]:
    """Return memory to the system after each file: glibc keeps what is freed, gigabytes in all."""
    yield
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def log_restored() -> Iterator[None]:
    """Take back what a command run in this process sets on the root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The converted demo model; skips where it has not been fetched."""
    if not (DEMO_MODEL / "config.json").exists():
        pytest.skip("the demo model is not there: make demo-model")
    return DEMO_MODEL


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama of 97 tokens whose text repeats itself soon."""
    return save_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def text_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tokenizer and a chat template."""
    return save_text_model(tmp_path_factory.mktemp("text-model"))


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """A process of a background job, or under nohup, ignores them, and so do those it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def made_engines() -> Iterator[list[RolloutEngine]]:
    """Check the integrity of every engine that a test made, whatever the test did to it."""
    made: list[RolloutEngine] = []
    initialize = RolloutEngine.__init__

    def recorded(engine: RolloutEngine, *arguments: object, **options: object) -> None:
        initialize(engine, *arguments, **options)
        made.append(engine)

    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own
        patch.setattr(RolloutEngine, "__init__", recorded)
        yield made
    for engine in made:
        engine.check_integrity()
