"""Agents' own clients, unmodified, against the server.

Each runs in a process of its own. `make test-agents` makes the environment that has them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.chain_model import save_chain_model
from tests.helpers.hang import HANG_SECONDS
from tests.helpers.ports import free_port
from tests.helpers.text_model import save_byte_model, save_text_model
from tests.helpers.tiny_model import save_tiny_llama
from tests.server.conftest import Live, run_server
from tests.server.test_openai_tools import CHAIN, OTHERS, TEMPLATE

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"


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
    model = save_byte_model(tmp_path_factory.mktemp("byte-model"), max_positions=1024)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if tools %}{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))  # is no text
    with run_server(model, {}, {}) as live:
        yield live


def run(script: str, *arguments: str) -> Any:
    found = subprocess.run(
        [sys.executable, HERE / script, *arguments],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[2])},
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


def test_renderers(tmp_path: Path) -> None:
    model = save_text_model(tmp_path / "policy", max_positions=512)
    with run_server(model, {"num_threads": 1}, {}) as live, live.client() as client:
        first, second = run("renderers_client.py", live.url, str(model))
        chat = {"messages": [{"role": "user", "content": "one two"}]}
        assert first["prompt_ids"] == client.post("/tokenize", json=chat).json()["tokens"]
        for turn in (first, second):
            sampling = {
                "max_tokens": 9, "temperature": 0.9, "top_p": 0.9, "seed": 3, "logprobs": 0
            }  # fmt: skip
            body = {"token_ids": turn["prompt_ids"], "sampling_params": sampling}
            (choice,) = client.post("/inference/v1/generate", json=body).json()["choices"]
            assert turn["completion_ids"] == choice["token_ids"]
            logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
            assert turn["completion_logprobs"] == logprobs
            assert turn["sampling_mask"] == choice["sampling_mask"]
            masks = zip(turn["completion_ids"], turn["sampling_mask"], strict=True)
            assert all(token in mask for token, mask in masks)
    assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]


def test_skyrl(tmp_path: Path) -> None:
    model = save_text_model(tmp_path / "policy", max_positions=512)
    second = save_tiny_llama(tmp_path / "second", max_positions=512, seed=1)
    adapter = tmp_path / "adapter"
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 4}
    shapes = {"lora_A": (1, 48), "lora_B": (48, 1)}
    torch.manual_seed(0)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tensors = {f"{layer}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    with run_server(model, {"num_threads": 1}, {"weights_root": str(tmp_path)}) as live:
        paths = [model, second / "model.safetensors", adapter]
        answer = run("skyrl_client.py", live.url, *map(str, paths))
    ids, logprobs, texts = answer["before"]
    assert [len(each) for each in ids] == [len(each) for each in logprobs] == [9, 9]
    assert all(texts)
    policies = [answer[name] for name in ("before", "sent", "updated", "adapted")]
    assert all(policies.count(each) == 1 for each in policies)
    assert answer["updated"] == answer["awake"] == answer["unloaded"]
    for sampled, rows in zip(answer["cut"], answer["support"], strict=True):
        assert all(token in row for token, row in zip(sampled, rows, strict=True))
    assert answer["sampled"] == [3, 3]
    assert answer["text"] == ["one two"]


def test_training_is_the_same_with_and_without_drafts(tmp_path: Path) -> None:
    model = save_text_model(tmp_path / "model", max_positions=512)
    logs = [
        train(model, tmp_path / f"{spec}.jsonl", "--spec", spec, *options)
        for spec, *options in (("none",), ("ngram", "--draft-tokens", "3"))
    ]
    plain, drafted = (
        [
            {name: value for name, value in event.items() if name not in COSTS}
            for event in log
            if event["event"] != "start"
        ]
        for log in logs
    )
    assert plain == drafted
    steps = [event for event in logs[1] if event["event"] == "step"]
    assert len(steps) == 2
    assert steps[0]["digest"] != steps[1]["digest"]
    assert max(event["accept_length"] for event in steps) > 1
    assert max(event["turns"] for event in steps) > 1
    for event in steps:
        same, later = event["turns_continued"].split(" of ")
        assert same == later
        assert event["logprob_gap"] < 1e-3


COSTS = ("accept_length", "cached", "rollout_seconds", "train_seconds", "sync_seconds")


def train(model: Path, log: Path, *options: str) -> list[dict[str, Any]]:
    """The events of a short run of the example."""
    command = [
        sys.executable, "-W", "ignore", EXAMPLES / "agents_grpo.py", "--model", model,
        "--output", log,
        "--port", str(free_port()), "--steps", "2", "--prompts", "2", "--samples", "2",
        "--held-out", "2", "--max-new-tokens", "120", "--lr", "1e-3", *options,
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in log.read_text().splitlines()]
