"""SGLang's own kits of server tests, unmodified, against the server: those that need no clever
model. The wheel brings the files; the package itself is never imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import files
from types import ModuleType, SimpleNamespace
from unittest import TestCase

import pytest

from tests.conftest import DEMO_MODEL
from tests.server.conftest import Live, client_of, run_server

KITS = {
    "basic_api_contract_kit": "BasicAPIContractMixin",
    "matched_stop_kit": "MatchedStopMixin",
    "regex_constrained_kit": "RegexConstrainedMixin",
    "ebnf_constrained_kit": "EBNFConstrainedMixin",
    "pause_generation_kit": "PauseResumeInPlaceMixin",
    "abort_timeout_kit": "AbortAllMixin",
}
CLEVER = {"test_ebnf_generate_complex_json"}  # its grammar allows more than it wants to read
SETTINGS = {
    "pause_num_requests": 4, "pause_max_new_tokens": 100, "pause_duration": 2,
    "pause_ignore_eos": True, "abort_all_num_requests": 8, "abort_all_max_new_tokens": 400,
}  # fmt: skip


def kit(name: str) -> ModuleType:
    """The module of a kit."""
    found = next(
        each for each in files("sglang") or () if str(each) == f"sglang/test/kits/{name}.py"
    )
    spec = importlib.util.spec_from_file_location(name, found.locate())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases() -> Iterator[tuple[type, str]]:
    for name, mixin in KITS.items():
        tests = getattr(kit(name), mixin)
        for test in sorted(each for each in dir(tests) if each.startswith("test_")):
            if test not in CLEVER:
                yield tests, test


def _name(each: type | str) -> str:
    return each if isinstance(each, str) else each.__name__


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    if not DEMO_MODEL.exists():
        pytest.skip("`make demo-model` fetches the model")
    with run_server(DEMO_MODEL, {}, {}) as live:
        yield live


@pytest.mark.parametrize(
    ("mixin", "test"), [*cases()], ids=lambda each: getattr(each, "__name__", each)
)
def test_kit(live: Live, mixin: type, test: str) -> None:
    fields = {
        "base_url": live.url,
        "model": live.serving.model_name,
        "served_model_name": live.serving.model_name,
        "client": client_of(live),
        "process": SimpleNamespace(poll=lambda: None),
    }
    case = type(mixin.__name__, (mixin, TestCase), SETTINGS | fields)
    case(test).debug()
