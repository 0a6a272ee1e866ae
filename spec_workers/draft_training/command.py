"""The command line of `specrollout train-draft`, its progress display and its plot."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import rich
import rich.progress
import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from rollout.config import DType
from rollout.errors import InvalidInputError
from rollout.hub import model_folder
from rollout.models.causal_lm import CausalLM
from rollout.models.loader import load_model, resolve_device
from rollout.models.spec import ModelSpec
from rollout.offline.job import StopSignals
from rollout.report.page import render_page
from rollout.report.panels import Chart, make_line, make_panel, panels_or, time_unit
from spec_workers.draft_training.arguments import (
    check_fit,
    check_options,
    naming_options,
    train_draft_parser,
)
from spec_workers.draft_training.block_draft import TrainableDFlash
from spec_workers.draft_training.block_start import begin_with_copies
from spec_workers.draft_training.building import TargetTensors, load_draft, new_draft
from spec_workers.draft_training.config import TrainingConfig
from spec_workers.draft_training.draft import DraftVocabulary, TrainableDraft
from spec_workers.draft_training.sequences import (
    TokenSequence,
    read_rollouts,
    split_by_prompt,
)
from spec_workers.draft_training.target_features import TargetFeatures
from spec_workers.draft_training.trainer import DraftTrainer
from spec_workers.draft_training.training_run import (
    LOG,
    PLOT,
    Record,
    RunOptions,
    RunProgress,
    TrainingRun,
    read_training_log,
)

EXIT_SIGNAL = 128  # plus the signal's number, as shells do

_MAX_HELD_OUT = 32  # rollouts: enough to compare drafts, and quick to measure
_HELD_OUT_SHARE = 0.05
_START_TEXTS = 40  # rollouts that a block draft's initial weights are fitted to


def run_train_draft(arguments: Sequence[str]) -> int:
    """Run the subcommand. Returns 0, or 128 plus the number of the signal that stopped it.

    Exits with code 2 for unknown arguments. Raises InvalidInputError, and what loading a model or a
    draft raises.
    """
    given = train_draft_parser().parse_args(arguments)
    given.model = Path(model_folder(str(given.model), "--model"))
    # Before the model is loaded, which may take minutes.
    check_options(given)
    target = ModelSpec.read(given.model)
    with naming_options():
        device = resolve_device(given.device)
        training = TrainingConfig(learning_rate=given.learning_rate)
        check_fit(given, target)
    train, held_out = _rollouts(given, target.vocab_size)
    _make_output(given.output)

    console = rich.get_console()
    console.print(f"loading {given.model}", highlight=False)
    model = load_model(given.model, DType(given.dtype), device)
    draft = _draft(given, model, train)
    trainer = DraftTrainer(
        draft,
        TargetTensors(model).head_rows(draft.vocabulary.token_ids_D).to(model.dtype),
        training,
    )
    max_bytes = int(given.features_gib * 2**30)
    run = TrainingRun(
        trainer,
        TargetFeatures(model, trainer.features, train, max_bytes),
        TargetFeatures(model, trainer.features, held_out, max_bytes),
        given.output,
        RunOptions(
            seconds=60 * given.minutes,
            batch_guesses=given.batch_guesses,
            check_seconds=60 * given.check_minutes,
            seed=given.seed,
        ),
    )
    if given.resume:
        with naming_options():
            run.resume()
    resumed_steps = trainer.steps
    _introduce(console, draft, train, held_out)
    with StopSignals() as stop, open_progress(console, 60 * given.minutes, 10.0) as report:
        run.train(lambda: stop.received is not None, report)
    return _conclude(console, given, run, stop, is_trained=trainer.steps > resumed_steps)


def _make_output(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(
            "--output", str(folder), f"cannot be made: {error.strerror}"
        ) from None


def _rollouts(
    given: argparse.Namespace, vocab_size: int
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    found = read_rollouts(given.rollouts, vocab_size, given.max_len, "--rollouts")
    if given.held_out is not None:
        held_out = read_rollouts(given.held_out, vocab_size, given.max_len, "--held-out")
        prompts = {each.prompt for each in held_out}
        train = [each for each in found if each.prompt not in prompts]
    else:
        train, held_out = split_by_prompt(
            found, min(_MAX_HELD_OUT, max(1, int(_HELD_OUT_SHARE * len(found)))), given.seed
        )
    if not train:
        if given.held_out is not None:
            remedy = "are all of held-out prompts: name others with --held-out"
        elif len({each.prompt for each in found}) == 1:
            remedy = "one prompt only: nothing is left to train on"
        else:
            remedy = "too few prompts: all are held out and nothing is left to train on"
        raise InvalidInputError("--rollouts", ", ".join(map(str, given.rollouts)), remedy)
    return train, held_out


def _draft(
    given: argparse.Namespace, model: CausalLM, train: list[TokenSequence]
) -> TrainableDraft:
    if given.resume:
        return load_draft(given.output, model.embed).to(model.device)
    vocabulary = DraftVocabulary.most_frequent(train, given.draft_vocab_size, model.spec.vocab_size)
    draft = new_draft(model, vocabulary, given.seed, given.kind).to(model.device)
    if isinstance(draft, TrainableDFlash):
        texts = TargetFeatures(model, draft.features, train, 0).take(
            range(len(train))[:_START_TEXTS]
        )
        begin_with_copies(
            draft,
            torch.cat([each.tokens.token_ids_L[:-1] for each in texts]).to(model.device),
            torch.cat([each.features_NF for each in texts]),
        )
    return draft


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
    console: Console,
    given: argparse.Namespace,
    run: TrainingRun,
    stop: StopSignals,
    *,
    is_trained: bool,
) -> int:
    try:
        plot_training(given.output / LOG, given.output / PLOT)
    except InvalidInputError as error:  # the draft is written, whatever became of its log
        console.print(f"no plot: {error}", highlight=False, markup=False, soft_wrap=True)
    assert run.best is not None, "measured before the first step"
    ending = f"wrote {given.output}"
    if not is_trained and stop.received is None:
        ending = f"no time left of --minutes {given.minutes:g}: give more"
    console.print(
        f"accept length {run.best.accept_length:.2f} on held-out rollouts; {ending}",
        highlight=False,
        soft_wrap=True,
    )
    if stop.received is None:
        return 0
    console.print(f"stopped by {stop.received.name}: the same command with --resume goes on")
    return EXIT_SIGNAL + stop.received


Progress = Callable[[RunProgress], None]
"""Shows the state after a step."""


@contextmanager
def open_progress(
    console: Console, total_seconds: float, line_seconds: float
) -> Iterator[Progress]:
    """Show a bar if ``console`` is a terminal, else lines ``line_seconds`` apart."""
    if not console.is_terminal:
        yield _Lines(console, total_seconds, line_seconds)
        return
    columns = (BarColumn(bar_width=None), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with rich.progress.Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("", total=total_seconds, text="")
        yield lambda progress: bar.update(task, completed=progress.seconds, text=_text(progress))


class _Lines:
    def __init__(self, console: Console, total_seconds: float, line_seconds: float) -> None:
        self._console = console
        self._total_seconds = total_seconds
        self._line_seconds = line_seconds
        self._shown_at = float("-inf")

    def __call__(self, progress: RunProgress) -> None:
        now = time.perf_counter()
        if now - self._shown_at < self._line_seconds:
            return
        self._shown_at = now
        left = max(0, round(self._total_seconds - progress.seconds))
        self._console.print(
            f"{_text(progress)}  ETA {left // 60}:{left % 60:02}", highlight=False, soft_wrap=True
        )


def _text(progress: RunProgress) -> str:
    agreement = "/".join(f"{share:.0%}" for share in progress.agreement)
    best = "-" if progress.accept_length is None else f"{progress.accept_length:.2f}"
    return (
        f"step {progress.step}  epoch {progress.epoch}  loss {progress.loss:.3f}  "
        f"agrees {agreement}  accept length {best}"
    )


_MAX_POINTS = 1000  # of a line


def plot_training(log: Path, plot: Path) -> None:
    """Draw a log. Raises InvalidInputError if it cannot be read."""
    records = read_training_log(log)
    steps = [record for record in records if record["event"] == "step"]
    steps = steps[:: 1 + len(steps) // _MAX_POINTS]
    checks = [record for record in records if record["event"] == "held out"]
    unit, unit_name = time_unit(max(record["seconds"] for record in records))

    def drawn(label: str, of: list[Record], values: list[float], series: int) -> dict[str, Any]:
        seconds = np.array([record["seconds"] for record in of])
        return make_line(label, seconds / unit, np.array(values), series, dots=len(of) < 40)

    losses = []
    for depth in range(len(steps[-1]["cross_entropies"]) if steps else 0):
        known = [record for record in steps if depth < len(record["cross_entropies"])]
        values = [record["cross_entropies"][depth] for record in known]
        losses.append(drawn(f"guess {depth + 1}", known, values, depth))
    accepted = drawn("", checks, [record["accept_length"] for record in checks], 0)
    panels = [
        make_panel(
            "cross entropy with the target's distribution, nats", lines=losses, xLabel=unit_name
        ),
        make_panel("tokens per forward on held-out rollouts", lines=[accepted], xLabel=unit_name),
    ]
    found, missing = panels_or(panels, "Training has not begun.")
    chart = Chart("over_time", "Over the time of training", "", found, missing)
    plot.write_bytes(render_page(f"{plot.parent.name}: training", [chart]))
