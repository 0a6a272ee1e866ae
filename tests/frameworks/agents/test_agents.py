"""Agents' own clients, unmodified, against the server.

They run in an environment of their own, which the tests skip without::

    python -m venv build/venv-agents
    build/venv-agents/bin/pip install verifiers langchain-openai
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chain_model import save_chain_model
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.text_model import save_byte_model
from tests.server.conftest import Live, run_server
from tests.server.test_openai_tools import CHAIN, OTHERS, TEMPLATE

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("AGENTS_PYTHON", HERE.parents[2] / "build/venv-agents/bin/python"))

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there")


@pytest.fixture(scope="module")
def tools_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model that calls ``add`` with 7, whatever it is told."""
    model = save_chain_model(
        tmp_path_factory.mktemp("agent"),
        [CHAIN, "<assistant> plain"],
        others=(*OTHERS, "8"),
        special=("<tool_call>", "</tool_call>"),
        chat_template=TEMPLATE,
    )
    with run_server(model, {"spec": "none"}, {}) as live:
        yield live


@pytest.fixture(scope="module")
def grammar_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    pytest.importorskip("llguidance")
    model = save_byte_model(tmp_path_factory.mktemp("byte-model"), max_positions=1024)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if tools %}{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))  # is no text
    with run_server(model, {}, {}) as live:
        yield live


def run(script: str, *arguments: str) -> dict[str, Any]:
    found = subprocess.run(
        [PYTHON, HERE / script, *arguments], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_langchain(tools_live: Live, grammar_live: Live) -> None:
    encode = grammar_live.serving.encoder.encode_word
    biases = dict.fromkeys(encode(" \n\r\t"), -100) | dict.fromkeys(encode("}"), 100)
    answer = run("langchain_client.py", tools_live.url, grammar_live.url, json.dumps(biases))
    assert answer["call"] == ["add", {"one": 7}]
    assert "add" in answer["streamed"]
    assert answer["second turn"] == "So: over"
    structured = answer["structured"]
    assert structured["json_schema"] == structured["function_calling"] == {"kind": "one"}
    assert isinstance(structured["json_mode"], dict)


def test_verifiers(tools_live: Live) -> None:
    answer = run("verifiers_client.py", tools_live.url)
    assert answer["errors"] == ["None", "None"]
    assert answer["rewards"] == [2.0, 2.0]
    assert answer["ids"] == answer["logprobs"]
    assert all(len(turns) == 2 and min(turns) > 0 for turns in answer["ids"])
