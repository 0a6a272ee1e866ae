"""Training drafts: the networks against others' arithmetic, and what training does to them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from rollout.models.aux_hidden_states import AuxHiddenStates
from rollout.models.eagle.loader import load_eagle
from rollout.models.spec import read_json
from spec_workers.draft_training.building import TargetTensors, load_draft
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
from tests.helpers.dense_attention import BlockAttention, DenseAttention
from tests.helpers.draft_training import DRAFT_VOCAB, VOCAB, computed, make_draft, make_trainer
from tests.helpers.plain_eagle import PlainEagle3

CPU = torch.device("cpu")


def test_rollouts_are_read_from_parquet_too(rollouts_path, rollouts, tmp_path):
    rows = [json.loads(line) for line in rollouts_path.read_text().splitlines()]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    found = read_rollouts([tmp_path / "rows.parquet"], VOCAB, 512)
    assert [each.prompt for each in found] == [each.prompt for each in rollouts]
    assert all(
        torch.equal(one.token_ids_L, other.token_ids_L)
        for one, other in zip(found, rollouts, strict=True)
    )


def unroll(draft, rows, num_steps):
    return draft.unroll(rows, num_steps, draft.anchors_A(rows))


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_loss_falls_and_accept_length_rises(target, rollouts, kind):
    trainer = make_trainer(target, rollouts, kind, learning_rate=5e-3)
    train, held_out = split_by_prompt(rollouts, 8, seed=0)
    sequences = computed(target, trainer.features, train)
    checked = computed(target, trainer.features, held_out)
    before = trainer.held_out_accept_length(checked)
    losses = [trainer.step(sequences[i % 2 :: 2]) for i in range(40)]
    after = trainer.held_out_accept_length(checked)
    # A block sees no tokens of its own, so the later ones stay uncertain.
    assert losses[-1].total < (0.5 if kind == "eagle3" else 0.9) * losses[0].total
    assert after.accept_length > before.accept_length + 0.4
    assert after.num_tokens == sum(len(each.token_ids_L) - each.first_root - 2 for each in held_out)
    assert len(losses[0].cross_entropies) == 3


def test_unrolled_eagle3_is_a_chain_behind_each_row(target, rollouts, tmp_path):
    """The paper's attention pattern: each row sees its own chain behind the rows before."""
    draft = make_draft(target, rollouts)
    save_draft(draft, tmp_path, torch.float32)
    tensors, config = load_file(tmp_path / "model.safetensors"), read_json(tmp_path / "config.json")
    plain = PlainEagle3(tensors, config, target.embed(torch.arange(VOCAB)), {})
    both = draft.features | AuxHiddenStates(final=True)
    sequences = computed(target, both, rollouts[:3])
    with torch.no_grad():
        unrolled = unroll(draft, PackedRows(sequences, both, draft.features, CPU), 4)
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


def test_a_saved_draft_is_the_engines_network_and_trained_on(target, rollouts, tmp_path):
    draft = make_draft(target, rollouts)
    save_draft(draft, tmp_path, torch.float32)
    again = load_draft(tmp_path, target.embed)
    assert again.config() == draft.config() | {"dtype": "float32"}
    assert again.features == draft.features
    for name, parameter in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name
    network = load_eagle(tmp_path, target)
    both = draft.features | AuxHiddenStates(final=True)
    rows = PackedRows(computed(target, both, rollouts[:4]), both, draft.features, CPU)
    attention = DenseAttention([each.num_rows for each in rows.sequences])
    with torch.inference_mode():
        (ours,) = unroll(draft, rows, 1)
        hidden = network.fuse(rows.features_TF)
        hidden = network.forward(rows.tokens_T(0), hidden, rows.positions_T, attention)
        theirs = hidden[rows.guesses_S]
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(draft.logits(ours), network.logits(theirs), atol=1e-4, rtol=1e-4)
        assert network.token_ids_D.tolist() == draft.vocabulary.token_ids_D.tolist()


@torch.no_grad()
def test_trained_blocks_are_the_engines(target, rollouts, tmp_path):
    draft = make_draft(target, rollouts, "block")
    save_draft(draft, tmp_path, torch.float32)
    again = load_draft(tmp_path, target.embed)
    assert again.config() == draft.config() | {"dtype": "float32"}
    network = load_eagle(tmp_path, target)
    both = draft.features | AuxHiddenStates(final=True)
    sequences = computed(target, both, rollouts[:4])
    rows = PackedRows(sequences, both, draft.features, CPU)
    anchors = draft.anchors_A(rows)
    assert 0 < len(anchors) < len(rows.guesses_S)
    unrolled = torch.stack(draft.unroll(rows, 1, anchors), dim=1)
    for found, anchor in zip(unrolled, anchors.tolist(), strict=True):
        (each,) = (s for s in rows.sequences if s.guesses.start <= anchor < s.guesses.stop)
        seen = int(rows.visible_S[anchor])
        attention, positions = BlockAttention(), rows.positions_T[each.rows][:seen]
        fused = network.fuse(rows.features_TF[each.rows][:seen])
        network.forward(positions, fused, positions, attention)
        block = torch.full((network.spec.block_size,), network.spec.mask_token_id)
        block[0] = rows.tokens_S(0)[anchor]
        hidden = network.draft(block, positions[-1] + 1 + torch.arange(len(block)), attention)
        torch.testing.assert_close(
            draft.logits(found), network.logits(hidden[1:]), atol=1e-4, rtol=1e-4
        )


def test_rows_count_what_their_trees_match_and_unreachable_guesses_weigh_nothing(target, rollouts):
    draft = make_draft(target, rollouts)
    both = draft.features | AuxHiddenStates(final=True)
    (sequence,) = computed(target, draft.features, rollouts[:1])
    everything = TreeShape(num_steps=1, topk=DRAFT_VOCAB, num_draft_tokens=DRAFT_VOCAB)
    with torch.inference_mode():
        matched = matched_lengths(draft, sequence, everything)
    tokens = sequence.tokens.token_ids_L.clone()
    known = draft.vocabulary.contains_V[tokens[sequence.tokens.first_root + 2 :]]
    assert matched.tolist() == known.int().tolist()

    (sequence,) = computed(target, both, rollouts[:1])
    tokens[-1] = int((~draft.vocabulary.contains_V).nonzero()[0])  # guessed by the last row alone
    last = TokenSequence(token_ids_L=tokens, first_root=len(tokens) - 3)
    unreachable = TrainingSequence(tokens=last, features_NF=sequence.features_NF)
    rows = PackedRows([unreachable], both, draft.features, CPU)
    head = TargetTensors(target).head_rows(draft.vocabulary.token_ids_D)
    assert float(unrolled_loss(draft, rows, head, 2).total.detach()) == 0.0


def test_a_rollout_may_fill_the_context(target, rollouts):
    trainer = make_trainer(target, rollouts, num_steps=5)
    length = target.spec.max_context_len
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    sequence = TrainingSequence(
        tokens=TokenSequence(token_ids_L=tokens, first_root=length - 12),
        features_NF=torch.randn(length - 1, 32 * trainer.features.count, generator=generator),
    )
    assert trainer.held_out_accept_length([sequence]).num_tokens == 10
    assert trainer.step([sequence]).total.isfinite()


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_resumed_runs_end_where_others_do(kind, target, rollouts, tmp_path):
    def run(folder: str) -> tuple[DraftTrainer, TrainingRun]:
        """A run whose clock counts steps as seconds."""
        (tmp_path / folder).mkdir(exist_ok=True)
        trainer = make_trainer(target, rollouts, kind)
        sources = [
            TargetFeatures(target, trainer.features, each, 10_000)
            for each in split_by_prompt(rollouts, 4, seed=1)
        ]
        options = RunOptions(seconds=10.0, batch_guesses=100, check_seconds=4.0)
        return trainer, TrainingRun(
            trainer, *sources, tmp_path / folder, options, clock=lambda: float(trainer.steps)
        )

    whole, straight = run("whole")
    straight.train(lambda: False, lambda progress: None)
    first, interrupted = run("parts")
    interrupted.train(lambda: first.steps == 6, lambda progress: None)
    second, resumed = run("parts")
    resumed.resume()
    assert second.steps == 6
    resumed.train(lambda: False, lambda progress: None)
    assert whole.steps == second.steps == 10
    for name, parameter in whole.draft.state_dict().items():
        assert torch.equal(second.draft.state_dict()[name], parameter), name
    logs = [read_training_log(tmp_path / name / LOG) for name in ("whole", "parts")]
    steps = [[each for each in log if each["event"] == "step"] for log in logs]
    assert steps[0] == steps[1]


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
