"""`specrollout train-draft`, and trained drafts inside engines."""

from __future__ import annotations

import signal
from contextlib import contextmanager

import pytest
import torch

from rollout import RolloutEngine
from rollout.cli import EXIT_BAD_INPUT, EXIT_SIGNAL, SUBCOMMANDS, _subcommand
from rollout.models.eagle.loader import load_eagle
from spec_workers.draft_training import command
from spec_workers.draft_training.held_out import TreeShape
from spec_workers.draft_training.training_run import save_draft
from tests.helpers.draft_training import DRAFT_VOCAB, GREEDY, computed, make_trainer


@pytest.mark.parametrize("topk", [1, 2])
def test_held_out_steps_are_the_engines(topk, target, target_path, rollouts, tmp_path):
    trainer = make_trainer(target, rollouts, learning_rate=5e-3)
    sequences = computed(target, trainer.features, rollouts)
    for i in range(15):
        trainer.step(sequences[i % 4 :: 4])
    save_draft(trainer.draft, tmp_path, torch.float32)
    shape = TreeShape(num_steps=3, topk=topk, num_draft_tokens=2 * topk + 1)
    options = {
        "draft_path": str(tmp_path),
        "budget": "fixed",
        "min_probability": 0.0,
        "topk": topk,
        "num_draft_tokens": shape.num_draft_tokens,
        "num_steps": shape.num_steps,
    }
    prompts = [each.token_ids_L[: each.first_root + 1].tolist() for each in rollouts]
    engine = RolloutEngine.from_pretrained(
        target_path, spec="eagle", spec_options=options, prefix_cache=False
    )
    made = engine.generate(prompts, GREEDY)
    engine.close()
    # The first token of a rollout comes without a draft.
    steps = [rollout.stats.verify_steps - 1 for rollout in made]
    expected = [trainer.held_out_accept_length([each], shape).num_steps for each in sequences]
    if topk == 1:  # a chain of the likeliest tokens, however likely
        assert steps == expected
    # Which nodes of a tree are kept depends on their probabilities, which the engine calibrates.
    assert sum(steps) == pytest.approx(sum(expected), rel=0.05)
    assert sum(steps) < 0.8 * sum(len(rollout.token_ids) - 1 for rollout in made)


def train_draft(*arguments: object) -> int:
    return _subcommand(SUBCOMMANDS["train-draft"], [str(each) for each in arguments])


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_run_is_interrupted_resumed_and_finished(
    kind, target_path, target, rollouts_path, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "draft"
    arguments = [
        "--kind", kind, "--model", target_path, "--rollouts", rollouts_path, "--output", output,
        "--minutes", "60", "--draft-vocab-size", str(DRAFT_VOCAB), "--batch-guesses", "200",
    ]  # fmt: skip

    @contextmanager
    def interrupting(*_):
        yield lambda progress: progress.step == 3 and signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "open_progress", interrupting)
    assert train_draft(*arguments) == EXIT_SIGNAL + signal.SIGINT
    assert load_eagle(output, target).spec.draft_vocab_size == DRAFT_VOCAB
    assert "held-out rollouts" in (output / "training.html").read_text()
    monkeypatch.undo()
    capsys.readouterr()

    log = output / "training.jsonl"
    before = {path: path.read_bytes() for path in [*target_path.iterdir(), log]}
    for options, says in (
        ([], "--resume"),
        (["--resume", "--max-len", "9"], "other rollouts"),
        (["--resume", "--draft-vocab-size", 8], "--draft-vocab-size=8"),
        (["--output", tmp_path / "b", "--held-out", rollouts_path], "held-out prompts"),
        (["--output", target_path], "--output"),
        (["--resume", "--held-out", log], "--output"),
    ):
        assert train_draft(*arguments, *options) == EXIT_BAD_INPUT, says
        assert says in capsys.readouterr().err.replace("\n", " ")
    assert {path: path.read_bytes() for path in [*target_path.iterdir(), log]} == before

    assert train_draft(*arguments, "--resume", "--minutes", "0.0001") == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "accept length" in shown
    assert "no time left of --minutes 0.0001: give more" in shown
    assert "wrote" not in shown


def test_wrong_options_are_named_before_anything_is_loaded(
    target_path, rollouts_path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "load_model", lambda *_: pytest.fail("loaded"))
    output = tmp_path / "draft"
    arguments = ["--model", target_path, "--rollouts", rollouts_path, "--output", output]
    for options, says in (
        (["--seed", "9" * 23], "--seed="),
        (["--learning-rate", "inf"], "--learning-rate=inf"),
        (["--device", "gpu"], "--device='gpu'"),
        (["--model", "nowhere"], "--model='nowhere': no such folder"),
        (["--resume"], "holds no training.pt: leave out --resume"),
        (["--rollouts", "nowhere.jsonl"], "--rollouts='nowhere.jsonl': cannot be read"),
    ):
        assert train_draft(*arguments, *options) == EXIT_BAD_INPUT, says
        assert says in capsys.readouterr().err
        assert not output.exists()


def test_rollouts_that_cannot_be_used_are_refused(target_path, tmp_path, capsys):
    path, output = tmp_path / "rows.jsonl", tmp_path / "draft"
    for content, says in (
        (b"[1, 2]", "line 1': is no JSON object"),
        (b'{"token_ids": [1, 2]}', "output.prompt_ids=true"),
        (b'{"prompt_ids": [1], "token_ids": "no"}', "token_ids must be a list"),
        (b'{"prompt_ids": [1], "token_ids": [99, 1]}', "vocabulary ends at 11"),
        (b'{"prompt_ids": [1], "token_ids": [1]}', "hold no rollout of two tokens"),
        (b'{"prompt_ids": [1], "token_ids": [4, 5, 6]}\n' * 5, "one prompt only: nothing is left"),
        (b"{", "line 1"),
        (b"PAR1\xff\xfe\x00", "is not JSONL text"),
        (b"", "hold no rollout\n"),
    ):
        path.write_bytes(content)
        arguments = ["--model", target_path, "--rollouts", path, "--output", output]
        assert train_draft(*arguments) == EXIT_BAD_INPUT, content
        error = capsys.readouterr().err
        assert error.startswith("error: --rollouts=")
        assert says in error
        assert not output.exists()
