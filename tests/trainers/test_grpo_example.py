"""The GRPO example trains, the same run with drafts and without, on one rank and on two."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
SPECS = {"none": ["--spec", "none"], "ngram": ["--spec", "ngram", "--draft-tokens", "4"]}
SHARING = {1: ["--zero", "2"], 2: ["--zero", "3"]}  # by the number of ranks

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
    with (folder / "printed").open("w") as printed:
        return subprocess.Popen(
            [
                sys.executable,
                *(launcher if ranks > 1 else []),
                str(EXAMPLES / "grpo_deepspeed.py"),
                *["--output", str(folder / "log.jsonl")],
                *arguments,
            ],
            env=os.environ
            | {
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "TORCH_EXTENSIONS_DIR": str(extensions_never_compiled(folder)),
            },
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def log_files(model, tmp_path_factory) -> dict[int, dict[str, Path]]:
    """By the number of ranks and where drafts come from."""
    return {ranks: run_both(ranks, model, tmp_path_factory) for ranks in SHARING}


def run_both(ranks: int, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {spec: tmp_path_factory.mktemp(f"{spec}-{ranks}") for spec in SPECS}
    processes = [
        start(folders[spec], [*SETTINGS, *SHARING[ranks], *own, "--model", str(model)], ranks)
        for spec, own in SPECS.items()
    ]
    try:
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    printed = "\n".join((folder / "printed").read_text()[-4000:] for folder in folders.values())
    assert codes == [0, 0], printed
    return {spec: folder / "log.jsonl" for spec, folder in folders.items()}


@pytest.fixture(scope="module")
def logs(log_files) -> dict[int, dict[str, Log]]:
    return {
        ranks: {
            spec: [json.loads(line) for line in file.read_text().splitlines()]
            for spec, file in files.items()
        }
        for ranks, files in log_files.items()
    }


def steps(log: Log) -> Log:
    return [record for record in log if record["event"] == "step"]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("ranks", SHARING)
def test_drafts_do_not_change_the_run(logs, ranks):
    plain, drafted = logs[ranks]["none"], logs[ranks]["ngram"]
    assert len(steps(plain)) == STEPS
    for one, other in zip(steps(plain), steps(drafted), strict=True):
        for field in ("digest", "reward", "tokens", "nll", "logprob_gap"):
            assert one[field] == other[field], (one["step"], field)
    assert plain[1] == drafted[1]  # evaluated before
    assert plain[-2:] == drafted[-2:]  # and after, and the weights
    assert all(step["accept_length"] == 1 for step in steps(plain))
    assert any(step["accept_length"] > 1 for step in steps(drafted))


@pytest.mark.timeout(500)
@pytest.mark.parametrize("ranks", SHARING)
def test_the_engine_follows_the_trainer(logs, ranks):
    for log in logs[ranks].values():
        assert any(step["reward"] > 0 for step in steps(log))
        assert all(step["logprob_gap"] < 1e-4 for step in steps(log)), steps(log)
        assert len({step["nll"] for step in steps(log)}) == STEPS


@pytest.mark.timeout(500)
def test_ranks_share_the_rollouts_of_one(logs):
    alone, shared = steps(logs[1]["none"]), steps(logs[2]["none"])
    assert alone[0]["digest"] == shared[0]["digest"]
    for one, other in zip(alone, shared, strict=True):  # gradients are summed in another order
        assert one["reward"] == other["reward"]
        assert one["nll"] == pytest.approx(other["nll"], abs=1e-4)


@pytest.mark.timeout(500)
def test_the_plot_compares_runs_of_one_seed(log_files, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["plot_grpo", *map(str, log_files[1].values()),
                                      "--output", str(tmp_path / "runs.png")])  # fmt: skip
    runpy.run_path(str(EXAMPLES / "plot_grpo.py"), run_name="__main__")
    assert f"{STEPS} steps, 0 of them different; last weights equal" in capsys.readouterr().out
    assert (tmp_path / "runs.png").stat().st_size > 1000


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


@pytest.mark.timeout(300)
def test_a_draft_that_follows_does_not_change_the_run(logs, model, tmp_path):
    draft = save_tiny_eagle3(tmp_path / "draft", model)
    own = ["--spec", "eagle", "--draft", str(draft), "--draft-tokens", "4", "--co-train", "2"]
    process = start(tmp_path, [*SETTINGS, *SHARING[1], *own, "--model", str(model)], ranks=1)
    try:
        code = process.wait(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, (tmp_path / "printed").read_text()[-4000:]
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for one, other in zip(steps(log), steps(logs[1]["none"]), strict=True):
        assert one["digest"] == other["digest"]
        assert one["logprob_gap"] == other["logprob_gap"]
    assert steps(log)[-1]["draft"]["steps"] > 0
    (drafts,) = [record for record in log if record["event"] == "drafts"]
    assert drafts["same"]
