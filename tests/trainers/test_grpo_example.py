"""The GRPO example trains, the same run with drafts and without, on one rank and on two."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.hang import HANG_SECONDS
from tests.helpers.launch import extensions_never_compiled
from tests.helpers.text_model import save_text_model
from tests.helpers.tiny_draft import save_tiny_eagle3

pytest.importorskip("deepspeed")
pytest.importorskip("reasoning_gym")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STEPS = 3
SETTINGS = f"""
    --steps {STEPS} --prompts 6 --samples 6 --max-new-tokens 5 --held-out 4
    --dtype float32 --shots 1 --lr 1e-3
""".split()
NONE, NGRAM = ["--spec", "none"], ["--spec", "ngram", "--draft-tokens", "4"]
RUNS = {  # the number of ranks and the arguments
    "none": (1, ["--zero", "2", *NONE]),
    "ngram": (1, ["--zero", "2", *NGRAM]),
    "shared": (2, ["--zero", "3", *NGRAM]),
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


def start(folder: Path, arguments: list[str], ranks: int) -> subprocess.Popen:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    own = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(extensions_never_compiled(folder)),
    }
    with (folder / "printed").open("w") as printed:
        return subprocess.Popen(
            [
                sys.executable,
                *(launcher if ranks > 1 else []),
                str(EXAMPLES / "grpo_deepspeed.py"),
                *["--output", str(folder / "log.jsonl")],
                *arguments,
            ],
            env=os.environ | own,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def log_files(model, tmp_path_factory) -> dict[str, Path]:
    """By the name of the run."""
    folders = {name: tmp_path_factory.mktemp(name) for name in RUNS}
    draft = save_tiny_eagle3(folders["eagle"] / "draft", model)
    processes = []
    try:
        for name, (ranks, own) in RUNS.items():
            arguments = [*SETTINGS, *own, "--model", str(model)]
            if name == "eagle":
                arguments += ["--draft", str(draft)]
            processes.append(start(folders[name], arguments, ranks))
        codes = [process.wait(HANG_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.terminate()  # torchrun then ends its ranks, which have sessions of their own
            process.wait()
    printed = "\n".join((folder / "printed").read_text()[-4000:] for folder in folders.values())
    assert codes == [0] * len(RUNS), printed
    return {name: folder / "log.jsonl" for name, folder in folders.items()}


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


def test_a_draft_that_follows_does_not_change_the_run(logs):
    plain, drafted = logs["none"], logs["eagle"]
    for one, other in zip(steps(plain), steps(drafted), strict=True):
        assert one["digest"] == other["digest"]
        assert one["logprob_gap"] == other["logprob_gap"]
    assert steps(drafted)[-1]["draft"]["steps"] > 0
    (drafts,) = [record for record in drafted if record["event"] == "drafts"]
    assert drafts["same"]


@pytest.mark.parametrize("name", RUNS)
def test_the_engine_follows_the_trainer(logs, name):
    log = logs[name]
    assert any(step["reward"] > 0 for step in steps(log))
    assert all(step["logprob_gap"] < 1e-4 for step in steps(log)), steps(log)
    assert len({step["nll"] for step in steps(log)}) == STEPS


def test_ranks_share_the_rollouts_of_one(logs):
    alone, shared = steps(logs["none"]), steps(logs["shared"])
    assert any(step["accept_length"] > 1 for step in shared)
    assert alone[0]["digest"] == shared[0]["digest"]
    for one, other in zip(alone, shared, strict=True):  # gradients are summed in another order
        assert one["reward"] == other["reward"]
        assert one["nll"] == pytest.approx(other["nll"], abs=1e-4)


def test_the_plot_compares_runs_of_one_seed(log_files, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(EXAMPLES)
    compared = [str(log_files[name]) for name in ("none", "ngram")]
    picture = tmp_path / "runs.png"
    monkeypatch.setattr(sys, "argv", ["plot_grpo", *compared, "--output", str(picture)])
    runpy.run_path(str(EXAMPLES / "plot_grpo.py"), run_name="__main__")
    assert f"{STEPS} steps, 0 of them different; last weights equal" in capsys.readouterr().out
    assert picture.stat().st_size > 1000


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--spec eagle", "--spec eagle: needs --draft FOLDER"),
        ("--spec eagle --draft nope", "--draft nope: no draft there"),
        ("--draft nope", "--draft: goes with --spec eagle"),
        ("--spec eagle --draft nope --co-train -1", "--co-train -1: must be at least 1"),
        ("--co-train 0", "--co-train 0: must be at least 1"),
        ("--co-train 1", "--co-train: goes with --spec eagle"),
        ("--draft-tokens 0", "--draft-tokens 0: must be at least 1"),
        ("--spec none --draft-tokens 2", "--draft-tokens: --spec none drafts nothing"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, says, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    parse_arguments = runpy.run_path(str(EXAMPLES / "grpo_deepspeed.py"))["parse_arguments"]
    monkeypatch.setattr(sys, "argv", ["grpo_deepspeed.py", *arguments.split()])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert says in capsys.readouterr().err
