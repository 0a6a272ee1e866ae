"""Training drafts: the networks against others' arithmetic, and what training does to them."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollout import RolloutEngine
from rollout.cli import EXIT_BAD_INPUT, EXIT_SIGNAL, SUBCOMMANDS, _subcommand
from rollout.config import DType
from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.eagle.loader import load_eagle
from rollout.models.loader import load_model
from rollout.models.mtp.loader import MtpChain
from rollout.models.spec import read_json
from rollout.types import SamplingParams
from spec_workers.draft_training import command
from spec_workers.draft_training.building import (
    DraftKind,
    DraftShape,
    TargetTensors,
    load_draft,
    new_draft,
)
from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft import DraftVocabulary
from spec_workers.draft_training.held_out import TreeShape, matched_lengths
from spec_workers.draft_training.loss import SoftCrossEntropy, unrolled_loss
from spec_workers.draft_training.packed_rows import PackedRows
from spec_workers.draft_training.sequences import (
    TokenSequence,
    TrainingSequence,
    read_rollouts,
    split_by_prompt,
)
from spec_workers.draft_training.target_features import TargetFeatures
from spec_workers.draft_training.trainer import DraftTrainer
from spec_workers.draft_training.training_run import (
    LOG,
    RunOptions,
    TrainingRun,
    read_training_log,
    save_draft,
)
from tests.helpers.dense_attention import DenseAttention
from tests.helpers.plain_eagle import PlainEagle3
from tests.helpers.tiny_model import save_tiny_llama

CPU = torch.device("cpu")
VOCAB, DRAFT_VOCAB = 11, 9
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few tokens, so that there is something to learn in a few steps."""
    folder = tmp_path_factory.mktemp("target")
    return save_tiny_llama(folder, vocab_size=VOCAB, num_layers=7, hidden_size=32, num_heads=4)


@pytest.fixture(scope="module")
def target(target_path: Path):
    return load_model(target_path, DType.float32, CPU)


@pytest.fixture(scope="module")
def rollouts_path(target_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own greedy text, as the offline job writes it."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, VOCAB, (int(length),), generator=generator).tolist()
        for length in torch.randint(2, 9, (60,), generator=generator)
    ]
    engine = RolloutEngine.from_pretrained(target_path, spec="none")
    rollouts = engine.generate(prompts, GREEDY)
    engine.close()
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    rows = [
        {"prompt_ids": prompt, "token_ids": rollout.token_ids}
        for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rollouts(rollouts_path: Path) -> list[TokenSequence]:
    return read_rollouts([rollouts_path], VOCAB, 512)


def make_draft(kind: str, target, rollouts):
    vocabulary = DraftVocabulary.most_frequent(rollouts, DRAFT_VOCAB, VOCAB)
    shape = DraftShape(kind=DraftKind(kind), chain_length=3, num_kv_heads=2, ffn_size=40)
    draft = new_draft(shape, target, vocabulary, 0)
    with torch.no_grad():  # so that norms are told apart
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(0))
    return draft


def make_trainer(kind: str, target, rollouts, **settings) -> DraftTrainer:
    draft = make_draft(kind, target, rollouts)
    head = TargetTensors(target).head_rows(draft.vocabulary.token_ids_D)
    return DraftTrainer(draft, head, TrainingConfig(autocast=False, warmup_steps=2, **settings))


def computed(target, features: AuxHiddenStates, rollouts) -> list[TrainingSequence]:
    return TargetFeatures(target, features, rollouts, 0).take(range(len(rollouts)))


def plain_model(draft, folder: Path, target):
    save_draft(draft, folder, torch.float32)
    tensors, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    everyone = torch.arange(VOCAB)
    return PlainEagle3(tensors, config, target.embed(everyone), {})


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_loss_falls_and_accept_length_rises(kind, target, rollouts):
    trainer = make_trainer(kind, target, rollouts, learning_rate=5e-3)
    train, held_out = split_by_prompt(rollouts, 8, seed=0)
    sequences = computed(target, trainer.features, train)
    checked = computed(target, trainer.features, held_out)
    before = trainer.held_out_accept_length(checked)
    losses = [trainer.step(sequences[i % 2 :: 2]) for i in range(40)]
    after = trainer.held_out_accept_length(checked)
    assert losses[-1].total < 0.5 * losses[0].total
    assert after.accept_length > before.accept_length + 0.4
    assert after.num_tokens == sum(len(each.token_ids_L) - each.first_root - 2 for each in held_out)
    assert len(losses[0].cross_entropies) == 3


def test_unrolled_eagle3_is_a_chain_behind_each_row(target, rollouts, tmp_path):
    """The paper's attention pattern: each row sees its own chain behind the rows before."""
    draft = make_draft("eagle3", target, rollouts)
    plain = plain_model(draft, tmp_path, target)
    sequences = computed(target, draft.features | AuxHiddenStates(final=True), rollouts[:3])
    rows = PackedRows(sequences, draft.features | AuxHiddenStates(final=True), draft.features, CPU)
    with torch.no_grad():
        unrolled = draft.unroll(rows, 4)
    row = 0
    for sequence in sequences:
        tokens = sequence.tokens.token_ids_L
        features = sequence.features_NF[:, : -target.spec.hidden_size]
        hidden = plain.fuse(list(features.chunk(3, dim=1)))
        for root in range(sequence.tokens.first_root, len(tokens) - 2):
            states, taken = hidden[: root + 1], tokens[1 : root + 2]
            for step in range(min(4, len(tokens) - 2 - root)):
                out = plain.forward(taken, states, torch.arange(len(taken)))
                torch.testing.assert_close(unrolled[step][row], out[-1], atol=2e-5, rtol=1e-4)
                torch.testing.assert_close(
                    draft.logits(unrolled[step][row]), plain.logits(out[-1]), atol=1e-4, rtol=1e-4
                )
                states = torch.cat([states, out[-1:]])
                taken = tokens[1 : len(taken) + 2]
            row += 1
    assert row == len(unrolled[0])


def test_stretches_begin_at_their_position(target, rollouts, tmp_path):
    draft = make_draft("eagle3", target, rollouts)
    both = draft.features | AuxHiddenStates(final=True)
    (sequence,) = computed(target, both, rollouts[:1])
    tokens = TokenSequence(token_ids_L=sequence.tokens.token_ids_L[5:], first_root=0)
    stretch = TrainingSequence(
        tokens=tokens, features_NF=sequence.features_NF[5:], first_position=5
    )
    rows = PackedRows([sequence, stretch], both, draft.features, CPU)
    end = len(sequence.features_NF) - 1
    assert rows.positions_T.tolist() == [*range(end), *range(5, end)]
    torch.testing.assert_close(rows.final_SE()[-1], sequence.features_NF[-1, -32:])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_engines_network_computes_the_same(kind, target, rollouts, tmp_path):
    draft = make_draft(kind, target, rollouts)
    save_draft(draft, tmp_path, torch.float32)
    if kind == "eagle3":
        networks = [load_eagle(tmp_path, target)] * 1
    else:
        networks = MtpChain.find(tmp_path, target.spec).load(target)
    sequences = computed(target, draft.features | AuxHiddenStates(final=True), rollouts[:4])
    rows = PackedRows(sequences, draft.features | AuxHiddenStates(final=True), draft.features, CPU)
    attention = DenseAttention([each.num_rows for each in rows.sequences])
    with torch.inference_mode():
        unrolled = draft.unroll(rows, len(networks))
        hidden = networks[0].fuse(rows.features_TF)
        for step, network in enumerate(networks):
            hidden = network.forward(rows.tokens_T(step), hidden, rows.positions_T, attention)
            inside = rows.is_inside_S(step)
            torch.testing.assert_close(
                unrolled[step][inside], hidden[rows.guesses_S][inside], atol=2e-5, rtol=1e-4
            )
            torch.testing.assert_close(
                draft.logits(unrolled[step])[inside],
                network.logits(hidden[rows.guesses_S])[inside],
                atol=1e-4,
                rtol=1e-4,
            )
        assert networks[0].token_ids_D.tolist() == draft.vocabulary.token_ids_D.tolist()


@pytest.mark.parametrize(("kind", "spec"), [("eagle3", "eagle"), ("mtp", "mtp")])
@pytest.mark.parametrize("topk", [1, 2])
def test_held_out_steps_are_the_engines(kind, spec, topk, target, target_path, rollouts, tmp_path):
    trainer = make_trainer(kind, target, rollouts, learning_rate=5e-3)
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
    }
    if kind == "eagle3":
        options["num_steps"] = shape.num_steps
    prompts = [each.token_ids_L[: each.first_root + 1].tolist() for each in rollouts]
    engine = RolloutEngine.from_pretrained(
        target_path, spec=spec, spec_options=options, prefix_cache=False
    )
    made = engine.generate(prompts, GREEDY)
    engine.close()
    # The first token of a rollout comes without a draft.
    steps = [rollout.stats.verify_steps - 1 for rollout in made]
    expected = [
        trainer.held_out_accept_length([sequence], shape).num_steps for sequence in sequences
    ]
    if topk == 1:  # a chain of the likeliest tokens, however likely
        assert steps == expected
    # Which nodes of a tree are kept depends on their probabilities, which the engine calibrates.
    assert sum(steps) == pytest.approx(sum(expected), rel=0.05)
    assert sum(steps) < 0.8 * sum(len(rollout.token_ids) - 1 for rollout in made)


def test_every_row_counts_what_its_tree_matches(target, rollouts):
    """A draft that always names the token that comes would match as deep as it may."""
    draft = make_draft("eagle3", target, rollouts)
    (sequence,) = computed(target, draft.features, rollouts[:1])
    everything = TreeShape(num_steps=1, topk=DRAFT_VOCAB, num_draft_tokens=DRAFT_VOCAB)
    with torch.inference_mode():
        matched = matched_lengths(draft, sequence, everything)
    tokens = sequence.tokens.token_ids_L
    known = draft.vocabulary.contains_V[tokens[sequence.tokens.first_root + 2 :]]
    assert matched.tolist() == known.int().tolist()


def test_guesses_that_cannot_be_reached_weigh_nothing(target, rollouts):
    draft = make_draft("eagle3", target, rollouts)
    both = draft.features | AuxHiddenStates(final=True)
    head = TargetTensors(target).head_rows(draft.vocabulary.token_ids_D)
    (sequence,) = computed(target, both, rollouts[:1])
    unknown = int((~draft.vocabulary.contains_V).nonzero()[0])
    tokens = sequence.tokens.token_ids_L.clone()
    tokens[-1] = unknown  # guessed by the last row alone
    last = TokenSequence(token_ids_L=tokens, first_root=len(tokens) - 3)
    rows = PackedRows(
        [TrainingSequence(tokens=last, features_NF=sequence.features_NF)], both, draft.features, CPU
    )
    assert float(unrolled_loss(draft, rows, head, 2).total.detach()) == 0.0


def test_a_saved_draft_is_trained_on(target, rollouts, tmp_path):
    for kind in ("eagle3", "mtp"):
        draft = make_draft(kind, target, rollouts)
        save_draft(draft, tmp_path / kind, torch.float32)
        again = load_draft(tmp_path / kind, target.embed)
        described = draft.config() | {"dtype": "float32"}
        assert again.config() == described
        assert again.features == draft.features
        for name, parameter in draft.state_dict().items():
            assert torch.equal(again.state_dict()[name], parameter), name


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_state_that_was_loaded_is_not_trained_on(kind, target, rollouts):
    trainer = make_trainer(kind, target, rollouts)
    batch = computed(target, trainer.features, rollouts[:4])
    trainer.step(batch)
    state = deepcopy(trainer.state_dict())
    after = []
    for _ in range(2):
        trainer.load_state_dict(state)
        for _ in range(3):
            trainer.step(batch)
        after.append(deepcopy(trainer.draft.state_dict()))
    for name, tensor in after[0].items():
        assert torch.equal(after[1][name], tensor), name


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_rollout_may_fill_the_context(kind, target, rollouts):
    trainer = make_trainer(kind, target, rollouts, num_steps=5)
    length = target.spec.max_context_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    sequence = TrainingSequence(
        tokens=TokenSequence(token_ids_L=tokens, first_root=length - 12),
        features_NF=torch.randn(length - 1, 32 * trainer.features.count, generator=generator),
    )
    assert trainer.held_out_accept_length([sequence]).num_tokens == 10
    assert trainer.step([sequence]).num_guesses == 10


def test_resumed_runs_end_where_others_do(target, rollouts, tmp_path):
    train, held_out = split_by_prompt(rollouts, 4, seed=1)

    def run(folder: Path) -> tuple[DraftTrainer, TrainingRun]:
        folder.mkdir(exist_ok=True)
        trainer = make_trainer("eagle3", target, rollouts)
        sources = [
            TargetFeatures(target, trainer.features, each, 10_000) for each in (train, held_out)
        ]
        options = RunOptions(seconds=10.0, batch_guesses=100, check_seconds=4.0)
        return trainer, TrainingRun(
            trainer, *sources, folder, options, clock=lambda: float(trainer.steps)
        )

    whole, straight = run(tmp_path / "whole")
    straight.train(lambda: False, lambda progress: None)
    first, interrupted = run(tmp_path / "parts")
    interrupted.train(lambda: first.steps == 6, lambda progress: None)
    second, resumed = run(tmp_path / "parts")
    resumed.resume()
    assert second.steps == 6
    resumed.train(lambda: False, lambda progress: None)
    assert whole.steps == second.steps == 10
    for name, parameter in whole.draft.state_dict().items():
        assert torch.equal(second.draft.state_dict()[name], parameter), name
    logs = [read_training_log(tmp_path / name / LOG) for name in ("whole", "parts")]
    steps = [[each for each in log if each["event"] == "step"] for log in logs]
    assert steps[0] == steps[1]


def train_draft(*arguments: object) -> int:
    return _subcommand(SUBCOMMANDS["train-draft"], [str(each) for each in arguments])


def test_command(target_path, target, rollouts_path, tmp_path, monkeypatch, capsys):
    output = tmp_path / "draft"
    arguments = [
        "--model", target_path, "--rollouts", rollouts_path, "--output", output,
        "--minutes", "60", "--draft-vocab-size", str(DRAFT_VOCAB), "--batch-guesses", "200",
    ]  # fmt: skip

    @contextmanager
    def interrupting(*_):
        yield lambda progress: progress.step == 3 and signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "open_progress", interrupting)
    assert train_draft(*arguments) == EXIT_SIGNAL + signal.SIGINT
    assert load_eagle(output, target).spec.draft_vocab_size == DRAFT_VOCAB
    assert (output / "training.jsonl").exists()
    assert "held-out rollouts" in (output / "training.html").read_text()

    assert train_draft(*arguments) == EXIT_BAD_INPUT
    assert "--resume" in capsys.readouterr().err
    monkeypatch.undo()
    assert train_draft(*arguments, "--resume", "--max-len", "9") == EXIT_BAD_INPUT
    assert "other rollouts" in capsys.readouterr().err.replace("\n", " ")

    other_kind = [*arguments, "--resume", "--kind", "mtp"]
    assert train_draft(*other_kind) == EXIT_BAD_INPUT
    assert "--kind" in capsys.readouterr().err
    for option, value in (("--draft-vocab-size", 8), ("--num-kv-heads", 1), ("--ffn-size", 9)):
        other_shape = [*arguments, "--resume", option, value]
        assert train_draft(*other_shape) == EXIT_BAD_INPUT
        assert f"{option}={value}" in capsys.readouterr().err
    same = [*arguments, "--output", tmp_path / "b", "--held-out", rollouts_path]
    assert train_draft(*same) == EXIT_BAD_INPUT
    assert "held-out prompts" in capsys.readouterr().err.replace("\n", " ")

    log = output / "training.jsonl"
    for options in (["--output", target_path], ["--resume", "--held-out", log]):
        before = {path: path.read_bytes() for path in [*target_path.iterdir(), log]}
        assert train_draft(*arguments, *options) == EXIT_BAD_INPUT
        assert "--output" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in [*target_path.iterdir(), log]} == before

    finishing = [*arguments, "--resume", "--minutes", "0.0001"]
    assert train_draft(*finishing) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "accept length" in shown
    assert "no time left of --minutes 0.0001: give more" in shown
    assert "wrote" not in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "9" * 23], "--seed="),
        (["--num-steps", "0"], "--num-steps=0"),
        (["--learning-rate", "inf"], "--learning-rate=inf"),
        (["--chain-length", "0"], "--chain-length=0"),
        (["--num-kv-heads", "3"], "--num-kv-heads=3"),
        (["--device", "gpu"], "--device='gpu'"),
        (["--model", "nowhere"], "--model='nowhere': no such folder"),
        (["--resume"], "holds no training.pt: leave out --resume"),
        (["--rollouts", "nowhere.jsonl"], "--rollouts='nowhere.jsonl': cannot be read"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(
    options, says, target_path, rollouts_path, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "load_model", lambda *_: pytest.fail("loaded"))
    output = tmp_path / "draft"
    arguments = ["--model", target_path, "--rollouts", rollouts_path, "--output", output]
    assert train_draft(*arguments, *options) == EXIT_BAD_INPUT
    assert says in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1, 2]", "has no prompt_ids"),
        (b'{"token_ids": [1, 2]}', "output.prompt_ids=true"),
        (b'{"prompt_ids": [1], "token_ids": "no"}', "token_ids must be a list"),
        (b'{"prompt_ids": [1], "token_ids": [99, 1]}', "vocabulary ends at 11"),
        (b'{"prompt_ids": [1], "token_ids": [1]}', "hold no rollout of two tokens"),
        (b'{"prompt_ids": [1], "token_ids": [4, 5, 6]}\n' * 5, "one prompt only: nothing is left"),
        (b"{", "line 1"),
        (b"PAR1\xff\xfe\x00", "is not JSONL text"),
        (b"", "hold no rollout\n"),
    ],
)
def test_rollouts_that_cannot_be_used(content, says, target_path, tmp_path, capsys):
    path, output = tmp_path / "rows.jsonl", tmp_path / "draft"
    path.write_bytes(content)
    arguments = ["--model", target_path, "--rollouts", path, "--output", output]
    assert train_draft(*arguments) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error.startswith("error: --rollouts=")
    assert says in error
    assert not output.exists()


def test_the_first_check_takes_time_too(target, rollouts, tmp_path, monkeypatch):
    trainer = make_trainer("eagle3", target, rollouts)
    train, held_out = (
        TargetFeatures(target, trainer.features, each, 10_000)
        for each in split_by_prompt(rollouts, 4, seed=1)
    )
    measure, checks = trainer.held_out_accept_length, []

    def slow(sequences):
        checks.append(trainer.steps)
        return measure(sequences)

    monkeypatch.setattr(trainer, "held_out_accept_length", slow)
    run = TrainingRun(
        trainer, train, held_out, tmp_path, RunOptions(seconds=5.0, batch_guesses=100),
        clock=lambda: float(trainer.steps + 3 * len(checks)),
    )  # fmt: skip
    run.train(lambda: False, lambda progress: None)
    assert trainer.steps == 2


def test_the_loss_and_its_gradients_are_those_of_plain_cross_entropy():
    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(size, 12, generator=generator, requires_grad=True) for size in (300, 31)
    )
    labels = torch.randn(300, 31, generator=generator).softmax(1)
    weights = torch.rand(300, generator=generator)
    found, agreed = SoftCrossEntropy.apply(hidden, head, labels, weights, torch.float32)
    grads = torch.autograd.grad(3 * found, (hidden, head))
    logits = hidden @ head.T
    expected = -(weights * (labels * logits.log_softmax(1)).sum(1)).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(3 * expected, (hidden, head)))
    same = logits.argmax(1) == labels.argmax(1)
    torch.testing.assert_close(agreed, weights[same].sum())
