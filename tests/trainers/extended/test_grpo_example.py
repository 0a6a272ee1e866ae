"""The GRPO example trains, the same run with drafts and without, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import launch
from tests.helpers.text_model import save_text_model
from tests.helpers.tiny_draft import save_tiny_eagle3

pytest.importorskip("deepspeed")
pytest.importorskip("reasoning_gym")

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 3
SETTINGS = f"""
    --steps {STEPS} --prompts 6 --samples 6 --max-new-tokens 5 --held-out 4
    --dtype float32 --shots 1 --lr 1e-3
""".split()
NONE, NGRAM = ["--spec", "none"], ["--spec", "ngram", "--draft-tokens", "4"]
RUNS = {  # the number of ranks and the arguments
    "none": (1, ["--zero", "2", *NONE]),
    "ngram": (1, ["--zero", "2", *NGRAM]),
    "probed": (1, ["--zero", "2", *NONE, "--probe", "2"]),
    "shared": (2, ["--zero", "3", *NGRAM]),
    "exact": (2, ["--zero", "3", "--spec", "ngram", "--exact"]),
    "eagle": (1, ["--zero", "2", "--spec", "eagle", "--draft-tokens", "4", "--co-train", "2"]),
}

Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Most of its words hold a digit, so that some rollouts earn a reward by chance."""
    folder = save_text_model(tmp_path_factory.mktemp("grpo") / "model")
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    special = list(tokenizer["model"]["vocab"])[:6]
    words = [*special, "+", "-", "=", *map(str, range(10))]
    words += [f"{chr(ord('a') + index // 10)}{index % 10}" for index in range(97 - len(words))]
    tokenizer["model"]["vocab"] = {word: index for index, word in enumerate(words)}
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def log_files(model, tmp_path_factory) -> dict[str, Path]:
    """By the name of the run."""
    found = {}
    for name, (ranks, own) in RUNS.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder / "log.jsonl"
        arguments = [*SETTINGS, *own, "--model", str(model), "--output", str(found[name])]
        if name == "eagle":
            arguments += ["--draft", str(save_tiny_eagle3(folder / "draft", model))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRPO_ARGUMENTS", json.dumps(arguments))
            launch("tests.trainers.extended.grpo_ranks", folder, ranks=ranks)
    return found


@pytest.fixture(scope="module")
def logs(log_files) -> dict[str, Log]:
    return {
        name: [json.loads(line) for line in file.read_text().splitlines()]
        for name, file in log_files.items()
    }


def steps(log: Log) -> Log:
    return [record for record in log if record["event"] == "step"]


def test_drafts_do_not_change_the_run(logs):
    plain, drafted = logs["none"], logs["ngram"]
    assert len(steps(plain)) == STEPS
    for one, other in zip(steps(plain), steps(drafted), strict=True):
        for field in ("digest", "reward", "tokens", "nll", "logprob_gap"):
            assert one[field] == other[field], (one["step"], field)
    assert plain[1] == drafted[1]  # evaluated before
    assert plain[-2:] == drafted[-2:]  # and after, and the weights
    assert all(step["accept_length"] == 1 for step in steps(plain))
    assert any(step["accept_length"] > 1 for step in steps(drafted))
    co_trained = logs["eagle"]
    for one, other in zip(steps(plain), steps(co_trained), strict=True):
        assert one["digest"] == other["digest"]
        assert one["logprob_gap"] == other["logprob_gap"]
    assert steps(co_trained)[-1]["draft"]["steps"] > 0
    (drafts,) = [record for record in co_trained if record["event"] == "drafts"]
    assert drafts["same"]


def test_the_engine_follows_the_trainer(logs):
    for name, log in logs.items():
        assert any(step["reward"] > 0 for step in steps(log)), name
        assert all(step["logprob_gap"] < 1e-4 for step in steps(log)), (name, steps(log))
        assert len({step["nll"] for step in steps(log)}) == STEPS, name


def test_with_exact_training_the_logprobs_are_the_engines(logs):
    assert [step["logprob_gap"] for step in steps(logs["exact"])] == [0.0] * STEPS


def test_a_probe_finds_trainer_and_engine_alike_and_changes_nothing(logs):
    (probe,) = [record for record in logs["probed"] if record["event"] == "probe"]
    assert (probe["step"], probe["rollouts"], probe["suspects"]) == (2, 1, [])
    assert 0 < probe["max_difference"] < 1e-4
    assert probe["ops"]
    for one, other in zip(steps(logs["none"]), steps(logs["probed"]), strict=True):
        assert one["digest"] == other["digest"]


def test_ranks_share_the_rollouts_of_one(logs):
    alone, shared = steps(logs["none"]), steps(logs["shared"])
    assert any(step["accept_length"] > 1 for step in shared)
    assert alone[0]["digest"] == shared[0]["digest"]
    for one, other in zip(alone, shared, strict=True):  # gradients are summed in another order
        assert one["reward"] == other["reward"]
        assert one["nll"] == pytest.approx(other["nll"], abs=1e-4)


def test_a_tree_gives_the_logprobs_and_gradients_of_its_sequences(tiny_model_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(EXAMPLES)
    from token_tree import TokenTree

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    prompt = [5, 17, 3, 80, 41]
    sequences = [[*prompt, *rest] for rest in ([7, 8, 9], [7, 8, 11, 12], [30], [7, 8, 9], [80, 5])]
    sequences.append([5, 17, 90, 6, 13, 22, 9])  # another prompt
    tree = TokenTree(sequences)
    assert tree.num_nodes == 5 + 5 + 1 + 2 + 5

    nodes = [node for path in tree.paths for node in path[5:]]
    weights_N = torch.linspace(-1, 1, len(nodes))
    shared_N = tree.logprobs(model, nodes, temperature=0.7)
    (shared_N * weights_N).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    apart = []
    for sequence in sequences:
        logits_LV = model(input_ids=torch.tensor([sequence])).logits[0]
        logprobs_LV = torch.log_softmax(logits_LV / 0.7, dim=-1)
        apart += [logprobs_LV[at - 1, sequence[at]] for at in range(5, len(sequence))]
    (torch.stack(apart) * weights_N).sum().backward()

    torch.testing.assert_close(shared_N, torch.stack(apart), rtol=1e-4, atol=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-4)
