"""The command line of `specrollout train-draft`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich
import torch
from rich.console import Console

from rollout.config import DType
from rollout.errors import InvalidInputError
from rollout.models.causal_lm import CausalLM
from rollout.models.loader import load_model, resolve_device
from rollout.models.spec import read_json
from rollout.offline.signals import StopSignals
from spec_workers.draft_training.building import DraftKind, DraftShape, load_draft, new_draft
from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft import TrainableDraft
from spec_workers.draft_training.mtp import MtpChain
from spec_workers.draft_training.plot import PLOT, plot_training
from spec_workers.draft_training.progress import open_progress
from spec_workers.draft_training.sequences import (
    SHORTEST,
    TokenSequence,
    read_rollouts,
    split_by_prompt,
)
from spec_workers.draft_training.target_features import TargetFeatures
from spec_workers.draft_training.target_tensors import TargetTensors
from spec_workers.draft_training.trainer import DraftTrainer
from spec_workers.draft_training.training_log import LOG
from spec_workers.draft_training.training_run import STATE, RunOptions, TrainingRun
from spec_workers.draft_training.vocabulary import DraftVocabulary

EXIT_SIGNAL = 128  # plus the signal's number, as shells do

_MOST_HELD_OUT = 32  # rollouts: enough to tell drafts apart, and soon measured
_HELD_OUT_SHARE = 0.05


def run_train_draft(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 128 and the signal's number where one stopped it.

    Ends the process with code 2 for arguments it does not know; raises InvalidInputError, and what
    loading a model or a draft raises.
    """
    given = _parser().parse_args(arguments)
    _check(given)
    console = rich.get_console()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    console.print(f"loading {given.model}", highlight=False)
    model = load_model(given.model, DType(given.dtype), resolve_device(given.device))
    train, held_out = _rollouts(given, model.spec.vocab_size)
    draft = _draft(given, model, train)
    trainer = DraftTrainer(
        draft.to(model.device),
        TargetTensors(model).head_rows(draft.vocabulary.token_ids_D).to(model.dtype),
        TrainingConfig(
            num_steps=given.num_steps,
            learning_rate=given.learning_rate,
            autocast=not given.float32,
        ),
    )
    kept_bytes = int(given.features_gib * 2**30)
    run = TrainingRun(
        trainer,
        TargetFeatures(model, trainer.features, train, kept_bytes),
        TargetFeatures(model, trainer.features, held_out, kept_bytes),
        given.output,
        RunOptions(
            seconds=60 * given.minutes,
            batch_guesses=given.batch_guesses,
            check_seconds=60 * given.check_minutes,
            seed=given.seed,
        ),
    )
    if given.resume:
        run.resume()
    _introduce(console, draft, train, held_out)
    with StopSignals() as stop, open_progress(console, 60 * given.minutes, 10.0) as report:
        run.train(lambda: stop.received is not None, report)
    return _conclude(console, given, run, stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specrollout train-draft",
        description="Train a draft on recorded rollouts of a model, so that spec=eagle or "
        "spec=mtp can use it. The folder then holds the draft (config.json, "
        "model.safetensors), training.jsonl and training.png, and what --resume needs. The "
        "draft kept is that of the best accept length on held-out rollouts. Ctrl-C saves and "
        "stops.",
    )

    def add(name: str, help: str, **options: Any) -> None:
        if options.get("default") is not None:
            help += "; default: %(default)s"
        if "type" in options:
            options.setdefault("metavar", "N")
        parser.add_argument(name, help=help, **options)

    add("--model", "the target's folder", type=Path, required=True, metavar="FOLDER")
    add(
        "--rollouts",
        "JSONL files of the offline job, written with output.prompt_ids=true",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
    )
    add("--output", "where the draft goes", type=Path, required=True, metavar="FOLDER")
    add(
        "--kind", "a tree's network, or a chain of steps", choices=list(DraftKind), default="eagle3"
    )
    add("--minutes", "of training, features and checks included", type=float, default=20.0)
    add(
        "--held-out",
        "rollouts to measure on, of prompts that are not trained on; default: all rollouts of some "
        "of the prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
    )
    add("--resume", "go on with an unfinished run of the same arguments", action="store_true")
    add(
        "--draft-vocab-size", "tokens the draft can name: the most frequent", type=int, default=8192
    )
    add("--chain-length", "steps of an MTP chain", type=int, default=2)
    add("--num-kv-heads", "of the draft; default: its query heads", type=int)
    add("--ffn-size", "of the draft; default: the target's", type=int)
    add("--num-steps", "guesses in a row that are unrolled", type=int, default=3)
    add("--learning-rate", "of AdamW", type=float, default=2e-3)
    add("--batch-guesses", "of an optimizer step", type=int, default=1024)
    add("--check-minutes", "between two checks on held-out rollouts", type=float, default=3.0)
    add(
        "--max-len",
        "tokens of a rollout that are used, its prompt's included",
        type=int,
        default=1024,
    )
    add("--features-gib", "memory for the target's hidden states", type=float, default=4.0)
    add("--dtype", "of the target", choices=[each.value for each in DType], default="auto")
    add("--float32", "products of the draft in float32, not bfloat16", action="store_true")
    add("--device", "auto, cpu or cuda[:n]", default="auto")
    add("--threads", "CPU threads; default: torch's", type=int)
    add("--seed", "of what is random: first weights, the order of rollouts", type=int, default=0)
    return parser


def _check(given: argparse.Namespace) -> None:
    """What the parts that get the values do not check."""
    for name in ("minutes", "check_minutes"):
        if not 0 < getattr(given, name) < math.inf:
            raise InvalidInputError(_flag(name), getattr(given, name), "must be > 0 minutes")
    for name, least in (
        ("batch_guesses", 1), ("draft_vocab_size", 2), ("max_len", SHORTEST), ("threads", 1),
    ):  # fmt: skip
        value = getattr(given, name)
        if value is not None and value < least:
            raise InvalidInputError(_flag(name), value, f"must be >= {least}")
    if not 0 <= given.features_gib < math.inf:
        raise InvalidInputError("--features-gib", given.features_gib, "must be >= 0")
    try:
        given.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            "--output", str(given.output), f"cannot be made: {error.strerror}"
        ) from None
    if not given.resume and (given.output / STATE).exists():
        raise InvalidInputError(
            "--output", str(given.output), "holds a run: go on with it by --resume, or give another"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rollouts(
    given: argparse.Namespace, vocab_size: int
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """To train on, and held out."""
    found = read_rollouts(given.rollouts, vocab_size, given.max_len, "--rollouts")
    if given.held_out is not None:
        held_out = read_rollouts(given.held_out, vocab_size, given.max_len, "--held-out")
        prompts = {each.prompt for each in held_out}
        train = [each for each in found if each.prompt not in prompts]
    else:
        train, held_out = split_by_prompt(
            found, min(_MOST_HELD_OUT, max(1, int(_HELD_OUT_SHARE * len(found)))), given.seed
        )
    if not train:
        raise InvalidInputError(
            "--rollouts", len(found), "are all of held-out prompts: name others with --held-out"
        )
    return train, held_out


def _draft(
    given: argparse.Namespace, model: CausalLM, train: list[TokenSequence]
) -> TrainableDraft:
    if given.resume:
        draft = load_draft(given.output, model.embed)
        _check_shape(given, model, draft)
        return draft
    vocabulary = DraftVocabulary.most_frequent(train, given.draft_vocab_size, model.spec.vocab_size)
    shape = DraftShape(
        kind=DraftKind(given.kind),
        chain_length=given.chain_length,
        num_kv_heads=given.num_kv_heads,
        ffn_size=given.ffn_size,
    )
    return new_draft(shape, model, read_json(given.model / "config.json"), vocabulary, given.seed)


def _check_shape(given: argparse.Namespace, model: CausalLM, draft: TrainableDraft) -> None:
    """What is asked for is what the folder holds. Raises InvalidInputError, naming the option."""
    if isinstance(draft, MtpChain) is not (given.kind == DraftKind.mtp):
        raise InvalidInputError("--kind", given.kind, f"is not what {given.output} holds")
    config = draft.config()
    spec = model.spec
    asked = {
        "draft_vocab_size": min(given.draft_vocab_size, spec.vocab_size),
        "num_kv_heads": given.num_kv_heads or spec.num_heads,
        "ffn_size": given.ffn_size or spec.ffn_size,
    }
    stored = {"num_kv_heads": "num_key_value_heads", "ffn_size": "intermediate_size"}
    if isinstance(draft, MtpChain):
        asked["chain_length"] = given.chain_length
        stored["chain_length"] = "num_nextn_predict_layers"
    for name, value in asked.items():
        held = config[stored.get(name, name)]
        if value != held:
            raise InvalidInputError(
                _flag(name), value, f"{given.output} holds a draft of {held}: give that to resume"
            )


def _introduce(
    console: Console,
    draft: TrainableDraft,
    train: list[TokenSequence],
    held_out: list[TokenSequence],
) -> None:
    tokens = sum(len(each.token_ids_L) for each in train)
    parameters = sum(parameter.numel() for parameter in draft.parameters())
    console.print(
        f"{parameters / 1e6:.1f} million parameters; {len(train)} rollouts of {tokens:,} tokens to "
        f"train on, {len(held_out)} held out; the draft can name "
        f"{draft.vocabulary.coverage(held_out):.1%} of the held-out tokens",
        highlight=False,
        soft_wrap=True,
    )


def _conclude(
    console: Console, given: argparse.Namespace, run: TrainingRun, stop: StopSignals
) -> int:
    try:
        plot_training(given.output / LOG, given.output / PLOT)
    except InvalidInputError as error:  # matplotlib is an extra; the draft is written all the same
        console.print(f"no plot: {error}", highlight=False, markup=False, soft_wrap=True)
    assert run.best is not None, "measured before the first step"
    console.print(
        f"accept length {run.best.accept_length:.2f} on held-out rollouts; wrote {given.output}",
        highlight=False,
        soft_wrap=True,
    )
    if stop.received is None:
        return 0
    console.print(f"stopped by {stop.received.name}: the same command with --resume goes on")
    return EXIT_SIGNAL + stop.received
