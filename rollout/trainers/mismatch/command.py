"""`specrollout mismatch`: why are a trainer's logprobs not the rollouts'?"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import rich

from rollout.engine.durable_files import whole_file
from rollout.engine.engine import RolloutEngine
from rollout.errors import InvalidInputError
from rollout.hub import model_folder
from rollout.offline.output_rows import job_rows
from rollout.report.log_reader import read_log
from rollout.report.page import save_page
from rollout.trainers.exact import exact_forward
from rollout.trainers.mismatch.compare import compare
from rollout.trainers.mismatch.page import mismatch_page
from rollout.trainers.mismatch.result import Cause
from rollout.trainers.mismatch.table import print_mismatch


def mismatch_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="specrollout mismatch",
        description="Compare a transformers model with the engine on a job's rollouts, op by op. "
        "Exits with 1 where a cause other than rounding is found.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a transformers folder, or ORG/NAME of the hub")
    add("rollouts", type=Path, metavar="ROLLOUTS", help="of a job with output.prompt_ids=true")
    add("--dtype", default="auto", help="of the engine (default: %(default)s)")
    add("--trainer-dtype", metavar="DTYPE", help="default: the engine's")
    add("--attention", metavar="NAME", help="the trainer's attn_implementation")
    add("--exact", action="store_true", help="the trainer trains exactly")
    add("--temperature", type=float, metavar="T", help="default: that of the job's log, or 1")
    add("--count", type=int, default=16, help="rollouts to read (default: %(default)s)")
    add("--left-padding", type=int, default=0, metavar="N", help="rows before each sequence")
    add("--json", type=Path, metavar="FILE", help="all figures, as one JSON object")
    add("--html", type=Path, metavar="FILE", help="a page with a heat map")
    return parser


def run_mismatch(arguments: Sequence[str]) -> int:
    """Print the tables. 1 where a cause other than rounding is found.

    Raises InvalidInputError, and what loading the model does.
    """
    given = mismatch_parser().parse_args(arguments)
    if given.count < 1:
        raise InvalidInputError("--count", given.count, "must be >= 1")
    for flag, path in (("--json", given.json), ("--html", given.html)):
        if path is not None and not _may_be_written(path, given.rollouts):
            remedy = "must name a file of its own, in a folder that exists"
            raise InvalidInputError(flag, str(path), remedy)
    rows = [row for _, row in islice(job_rows(given.rollouts, "ROLLOUTS"), given.count)]
    temperature = _temperature(given.rollouts) if given.temperature is None else given.temperature
    folder = model_folder(given.model, "MODEL")
    with closing(RolloutEngine.from_pretrained(folder, "none", dtype=given.dtype)) as engine:
        model = _trainer(folder, given, engine)
        with exact_forward(model) if given.exact else nullcontext():
            found = compare(
                model, engine, rows, temperature=temperature, left_padding=given.left_padding
            )
    print_mismatch(rich.get_console(), found)
    if given.json is not None:
        with whole_file(given.json) as file:
            file.write(json.dumps(found.to_json()).encode() + b"\n")
    if given.html is not None:
        save_page(given.html, mismatch_page(found, f"{given.model}, {given.rollouts}"))
    return int(any(each.cause is not Cause.ROUNDING for each in found.suspects))


def _may_be_written(path: Path, rollouts: Path) -> bool:
    is_theirs = path.resolve() in (rollouts.resolve(), _log_of(rollouts).resolve())
    return path.parent.is_dir() and not path.is_dir() and not is_theirs


def _log_of(rollouts: Path) -> Path:
    return rollouts.with_name(f"{rollouts.name}.log")


def _trainer(folder: str, given: argparse.Namespace, engine: RolloutEngine) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": given.attention} if given.attention else {}
    dtype = given.trainer_dtype or engine.worker.model_dtype
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise InvalidInputError("MODEL", folder, f"transformers cannot open it: {error}") from None
    return model.to(engine.worker.model_device)


def _temperature(rollouts: Path) -> float:
    """The temperature in the log beside a job's output; 1 without a log."""
    path = _log_of(rollouts)
    runs = read_log(path).runs if path.is_file() else []
    found = runs[-1].settings.get("temperature") if runs else None
    return found if isinstance(found, int | float) and 0 <= found < math.inf else 1.0
