"""Neural drafts: accept length, what they add to the corpus, and that they never slow a step down.

Held-out prompts are the demo's; no demo draft is trained on them. Make the drafts first, with
`make demo-draft` and `make demo-mtp`. The part "co-training" trains policy and draft for some
minutes.

    python benchmarks/bench_eagle.py --draft drafts/eagle3 --mtp drafts/mtp
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eagle_bench.accept_length import accept_length_rows
from eagle_bench.co_training import co_training_rows
from eagle_bench.entrants import Folders
from eagle_bench.epochs import epoch_rows
from eagle_bench.held_out import DEFAULT_PROMPTS, held_out_prompts
from eagle_bench.speed import settings, speed_rows
from table import Row, finish, parser

MAX_TOKENS = 128
NUM_PROBLEMS = 4
"""Of the epochs, in each of which every one is decoded several times."""
SETTINGS = settings(MAX_TOKENS)
PARTS = ("accept length", "epochs", "co-training", *(f"speed, {each.name}" for each in SETTINGS))


def folders(options: argparse.Namespace) -> Folders:
    """Raises FileNotFoundError, with the command that makes what is missing."""
    return Folders(
        model=options.model,
        eagle3=_folder("--draft", options.draft, "make demo-draft"),
        mtp=_folder("--mtp", options.mtp, "make demo-mtp"),
    )


def _folder(option: str, path: str, command: str) -> Path | None:
    if path == "none":
        return None
    if not (Path(path) / "config.json").exists():
        raise FileNotFoundError(
            f"{option} {path}: no draft there; `{command}` trains the demo model's, {option} none "
            "leaves it out"
        )
    return Path(path)


def parts(options: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    """By name, in order; --only picks among the names."""
    found, prompts = folders(options), held_out_prompts(options.prompts, options.num_prompts)
    problems = held_out_prompts(options.prompts, NUM_PROBLEMS, with_answers=True)
    runs: list[Callable[[], list[Row]]] = [
        partial(accept_length_rows, found, prompts, MAX_TOKENS),
        partial(epoch_rows, found, problems, MAX_TOKENS, 0.7),
        partial(co_training_rows, found),
        *(partial(speed_rows, found, each, prompts, options.repeats) for each in SETTINGS),
    ]
    return dict(zip(PARTS, runs, strict=True))


def main() -> None:
    arguments = parser(__doc__)
    arguments.formatter_class = argparse.RawDescriptionHelpFormatter

    def add(name: str, help: str, **settings: Any) -> None:
        arguments.add_argument(name, help=help + "; default: %(default)s", **settings)

    add("--model", "the target", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    add("--draft", "an EAGLE-3 draft, or none", default="drafts/eagle3")
    add("--mtp", "an MTP chain, or none", default="drafts/mtp")
    add("--prompts", "held-out ones, JSON lines", type=Path, default=DEFAULT_PROMPTS)
    add("--num-prompts", "of them", type=int, default=18)
    add("--threads", "CPU threads", type=int, default=2)
    add("--repeats", "races the median is taken of", type=int, default=2)
    arguments.add_argument(
        "--only",
        default="",
        help=f"run the parts whose name contains this; default: all: {'; '.join(PARTS)}",
    )
    options = arguments.parse_args()
    for name in ("num_prompts", "repeats", "threads"):
        if getattr(options, name) < 1:
            arguments.error(f"--{name.replace('_', '-')}={getattr(options, name)}: must be >= 1")
    torch.set_num_threads(options.threads)
    try:
        known = parts(options)
    except FileNotFoundError as error:
        arguments.error(str(error))
    chosen = {name: part for name, part in known.items() if options.only in name}
    if not chosen:
        arguments.error(f"--only={options.only!r}: must be part of one of: {'; '.join(PARTS)}")
    rows: list[Row] = []
    for name, part in chosen.items():
        started = time.perf_counter()
        rows += part()
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    finish(f"neural drafts, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
