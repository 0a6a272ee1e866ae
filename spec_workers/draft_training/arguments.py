"""The options of `specrollout train-draft`, checked before a model is loaded."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout.config import DType
from rollout.errors import InvalidInputError
from rollout.models.spec import ModelSpec, read_json
from spec_workers.draft_training.building import ARCHITECTURES, check_target
from spec_workers.draft_training.sequences import SHORTEST
from spec_workers.draft_training.training_run import CONFIG, LOG, PLOT, STATE, WEIGHTS


def train_draft_parser() -> argparse.ArgumentParser:
    """The parser of the subcommand's arguments."""
    parser = argparse.ArgumentParser(
        prog="specrollout train-draft",
        description="Train a draft on recorded rollouts of a model, so that spec=eagle "
        "or spec=block can use it. The folder then holds the draft (config.json, "
        "model.safetensors), training.jsonl, training.html, and what --resume needs. The "
        "draft written is the one with the best accept length on held-out rollouts. Ctrl-C saves "
        "and stops.",
    )

    def add(name: str, help: str, **options: Any) -> None:
        if options.get("default") is not None:
            help += "; default: %(default)s"
        if "type" in options:
            options.setdefault("metavar", "N")
        parser.add_argument(name, help=help, **options)

    add("--model", "the target: a folder, or its name on the hub", type=Path, required=True,
        metavar="FOLDER")  # fmt: skip
    add(
        "--rollouts",
        "outputs of the offline job, written with output.prompt_ids=true",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
    )
    add("--kind", "eagle3, or block: DFlash", choices=list(ARCHITECTURES), default="eagle3")
    add("--output", "where the draft goes", type=Path, required=True, metavar="FOLDER")
    add(
        "--minutes",
        "of training, with features, checks and the runs that it resumes",
        type=float,
        default=20.0,
    )
    add(
        "--held-out",
        "rollouts to measure on, whose prompts are not trained on; default: all rollouts of some "
        "prompts",
        type=Path,
        nargs="+",
        metavar="FILE",
    )
    add("--resume", "continue an unfinished run with the same arguments", action="store_true")
    add(
        "--draft-vocab-size", "tokens the draft can name: the most frequent", type=int, default=8192
    )
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
    add("--device", "auto, cpu or cuda[:n]", default="auto")
    add("--seed", "of what is random: first weights, the order of rollouts", type=int, default=0)
    return parser


def check_options(given: argparse.Namespace) -> None:
    """Check the options that no other part checks. Raises InvalidInputError."""
    if not given.model.is_dir():
        raise InvalidInputError("--model", str(given.model), "no such folder")
    for name in ("minutes", "check_minutes"):
        if not 0 < getattr(given, name) < math.inf:
            raise InvalidInputError(_flag(name), getattr(given, name), "must be > 0 minutes")
    for name, minimum in (
        ("batch_guesses", 1), ("draft_vocab_size", 2), ("max_len", SHORTEST)
    ):  # fmt: skip
        value = getattr(given, name)
        if value < minimum:
            raise InvalidInputError(_flag(name), value, f"must be >= {minimum}")
    if not 0 <= given.features_gib < math.inf:
        raise InvalidInputError("--features-gib", given.features_gib, "must be >= 0")
    if not 0 <= given.seed < 2**63:
        raise InvalidInputError("--seed", given.seed, "must be in [0, 2**63 - 1]")
    if given.output.exists() and not given.output.is_dir():
        raise InvalidInputError("--output", str(given.output), "cannot be made: it is a file")
    holds_run = (given.output / STATE).exists()
    if holds_run and not given.resume:
        raise InvalidInputError(
            "--output",
            str(given.output),
            "holds a run: continue it with --resume, or give another folder",
        )
    if given.resume and not holds_run:
        raise InvalidInputError(
            "--output",
            str(given.output),
            f"holds no {STATE}: leave out --resume to start a new run",
        )
    if not holds_run:
        for name in (CONFIG, WEIGHTS):
            if (given.output / name).exists():
                raise InvalidInputError(
                    "--output",
                    str(given.output),
                    f"holds another model's {name}: give a new folder",
                )
    written = {
        os.path.realpath(given.output / name) for name in (CONFIG, WEIGHTS, STATE, LOG, PLOT)
    }
    for name in ("rollouts", "held_out"):
        for path in getattr(given, name) or ():
            if os.path.realpath(path) in written:
                raise InvalidInputError(
                    "--output",
                    str(given.output),
                    f"would replace {path}, which {_flag(name)} reads",
                )


def check_fit(given: argparse.Namespace, target: ModelSpec) -> None:
    """Raise InvalidInputError unless a draft of the target can be made and, for a resumed run, the
    folder's draft is what the options ask for."""
    check_target(target)
    if not given.resume:
        return
    config = read_json(given.output / CONFIG, "a draft's folder")
    if config.get("architectures") != [ARCHITECTURES[given.kind]]:
        raise InvalidInputError(
            "output", str(given.output), f"holds no draft of --kind {given.kind}"
        )
    asked = min(given.draft_vocab_size, target.vocab_size)
    held = config.get("draft_vocab_size")
    if asked != held:
        raise InvalidInputError(
            "draft_vocab_size",
            asked,
            f"{given.output} holds a draft of {held}: give that to resume",
        )


@contextmanager
def naming_options() -> Iterator[None]:
    """Make InvalidInputErrors about a field name the option that sets it."""
    try:
        yield
    except InvalidInputError as error:
        name = _flag(error.field.rpartition(".")[2])
        raise InvalidInputError(name, error.value, error.remedy) from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
