"""`specrollout compare`: does speculation pay for this model, these prompts and this machine?"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

import rich
from hydra import compose, initialize_config_module
from rich import box
from rich.console import Console
from rich.table import Table

from rollout.cluster.config import ClusterKind
from rollout.engine.durable_files import whole_file
from rollout.engine.engine import RolloutEngine
from rollout.engine.worker_factory import factory_of
from rollout.errors import InvalidInputError
from rollout.memory.sizing import free_bytes
from rollout.offline.command_line import take_flags, words_as_overrides
from rollout.offline.compare.comparison import Compared, Comparison, Work
from rollout.offline.compare.paired_times import SpeedupVerdict
from rollout.offline.config import RunConfig
from rollout.offline.hydra_config import checked_config, hydra_errors, register_schema
from rollout.offline.paths import JobPaths
from rollout.offline.progress import loading_model
from rollout.offline.prompt_check import check_rows
from rollout.offline.prompt_tokens import TokenizedPrompts
from rollout.offline.prompts import PromptFile
from rollout.types import Prompt

_SPARE = 3
"""Times the bytes of its weights that must be free for a second engine and its KV."""

_Number = TypeVar("_Number", int, float)

_EPILOG = """\
examples:
  specrollout compare my/model prompts.jsonl --n 8
  specrollout compare my/model prompts.jsonl spec=hybrid spec.draft_path=my/draft
  specrollout compare experiment=demo --widths 1,4,8 --temperatures 0.7,1.0

Each epoch samples every prompt sampling.n times, with new seeds. The last epoch is decoded with
and without drafts in turns, by two engines where the memory of a CPU holds them; earlier epochs
teach the drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The command's own arguments; the others are overrides of the job's configuration."""

    widths: list[int]
    temperatures: list[float] | None  # None: the job's
    epochs: int
    minutes: float  # of the compared epochs, all rows together
    json: Path | None
    overrides: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    temperature: float
    width: int
    compared: Compared


def run_compare(arguments: Sequence[str]) -> int:
    """Print a row for each temperature and width. 1 where tokens or logprobs differ.

    Raises InvalidInputError, and what loading the model does.
    """
    options = compare_options(arguments)
    with hydra_errors(RunConfig, options.overrides):
        config = _config(options)
    if options.json is not None:
        _check_json(options.json, config)
    console = rich.get_console()
    rows = list(_compare(config, options, console))
    _print(rows, _kind(config), console)
    if options.json is not None:
        with whole_file(options.json) as file:
            file.write("".join(json.dumps(_as_json(row, config)) + "\n" for row in rows).encode())
    return 1 if any(row.compared.differing for row in rows) else 0


def compare_options(arguments: Sequence[str]) -> CompareOptions:
    """The command's options. Exits for those it does not know; raises InvalidInputError."""
    parser = argparse.ArgumentParser(
        prog="specrollout compare",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="ARGUMENT",
        help="a job's (specrollout --help): MODEL PROMPTS KEY=VALUE",
    )
    parser.add_argument(
        "--widths",
        default="1,4,8",
        help="requests decoded together: the tail of a batch has few (default: %(default)s)",
    )
    parser.add_argument("--temperatures", help="default: sampling.temperature")
    parser.add_argument("--epochs", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of comparing (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the rows, a JSON object a line")
    flags, others = take_flags(arguments, RunConfig)
    for flag in flags:
        if flag.startswith("sampling.temperature=") and "," in flag:
            several = flag.partition("=")[2]
            raise InvalidInputError("--temperature", several, "compare takes --temperatures")
    given = parser.parse_intermixed_args(others)
    options = CompareOptions(
        widths=_numbers("--widths", given.widths, int),
        temperatures=given.temperatures and _numbers("--temperatures", given.temperatures, float),
        epochs=given.epochs,
        minutes=given.minutes,
        json=given.json,
        overrides=[*words_as_overrides(given.overrides, RunConfig, flags), *flags],
    )
    if options.epochs < 1:
        raise InvalidInputError("--epochs", options.epochs, "must be >= 1")
    if not options.minutes > 0:
        raise InvalidInputError("--minutes", options.minutes, "must be > 0")
    if min(options.widths) < 1:
        raise InvalidInputError("--widths", given.widths, "must be >= 1 request")
    return options


def _numbers(name: str, text: str, kind: Callable[[str], _Number]) -> list[_Number]:
    try:
        return [kind(each) for each in text.split(",")]
    except ValueError:
        raise InvalidInputError(name, text, "must be comma-separated numbers") from None


def _config(options: CompareOptions) -> RunConfig:
    register_schema("run_schema", RunConfig)
    with initialize_config_module("rollout.conf", version_base="1.3"):
        config = compose("config", overrides=options.overrides)
    run_config = checked_config(config, RunConfig, "specrollout")
    if run_config.parallel.size > 1 or run_config.cluster.kind is not ClusterKind.none:
        raise InvalidInputError("parallel.size, cluster.kind", "", "compare runs one engine")
    if _kind(run_config) == "none":
        raise InvalidInputError("spec", "none", "is what drafts are compared with: name another")
    return run_config


def _kind(config: RunConfig) -> str:
    return str(config.spec["_target_"]).split(".")[1]


def _check_json(path: Path, config: RunConfig) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidInputError("--json", str(path), "must name a file in a folder that exists")
    # Of a job's own name, whatever the file's: what is asked is which files are read.
    as_output = replace(config, output=replace(config.output, path=f"{path}.jsonl"))
    JobPaths(as_output).require_unread("--json", path)


def _compare(config: RunConfig, options: CompareOptions, console: Console) -> Iterator[ComparedRow]:
    temperatures = options.temperatures or [config.sampling.temperature]
    seconds = options.minutes * 60 / (len(options.widths) * len(temperatures))
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        file = PromptFile(config.data)
        checked = check_rows(file, config.data.on_error, folder / "none.jsonl", ())
        factory = factory_of(config.spec)
        engines: list[RolloutEngine] = []
        while not engines or (len(engines) == 1 and _fits_again(engines[0])):
            with loading_model(console, config.model.path) as progress:
                engines.append(RolloutEngine.from_config(config.engine, factory, progress))
            at_end.callback(engines[-1].close)
        tokenized = TokenizedPrompts(checked, engines[0], config).rows()
        prompts: list[Prompt] = [each.token_ids.tolist() for each in tokenized]
        learns = engines[0].corpus_tokens is not None
        start, taught = folder / "start", folder / "taught"
        if learns:
            engines[0].save_corpus(start)
        for temperature in temperatures:
            sampling = replace(config.sampling, temperature=temperature)
            if learns:
                engines[0].load_corpus(start)
            # A corpus that one engine was taught serves both.
            teaching = Comparison(*(engines[:1] if learns else engines))
            for epoch in range(options.epochs - 1):
                console.print(f"epoch {epoch} at temperature {temperature:g} teaches the drafts")
                whole = Work(prompts=prompts, params=sampling, width=engines[0].max_running)
                teaching.teach(whole.of_epoch(epoch))
            if learns:
                engines[0].save_corpus(taught)
            for width in options.widths:
                if learns:  # no rollout may be drafted from itself
                    for engine in engines:
                        engine.load_corpus(taught)
                console.print(
                    f"comparing at temperature {temperature:g}, {width} at a time, for about "
                    f"{seconds:.0f} s"
                )
                work = Work(prompts=prompts, params=sampling, width=width)
                compared = Comparison(*engines).run(work.of_epoch(options.epochs - 1), seconds)
                yield ComparedRow(temperature=temperature, width=width, compared=compared)


def _fits_again(engine: RolloutEngine) -> bool:
    """Whether a second engine fits in a CPU's memory; on a GPU one engine decodes both sides."""
    device = engine.worker.model_device
    weights = sum(
        prod(loader.shape) * loader.dtype.itemsize
        for model in engine.worker.weights.parts.values()
        for loader in model.weight_loaders().values()
    )
    return device.type == "cpu" and free_bytes(device) > _SPARE * weights


def _print(rows: Sequence[ComparedRow], kind: str, console: Console) -> None:
    """Print the table, and the line that a reader should remember: of the row that gains most."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("temperature", "together", "accept length", "speedup, 95 %", "drafts"):
        table.add_column(name, justify="right")
    for row in rows:
        compared = row.compared
        table.add_row(
            f"{row.temperature:g}",
            str(row.width),
            f"{compared.accept_length:.2f}",
            str(compared.times),
            compared.times.verdict.value,
        )
    console.print(table)
    if differing := sum(len(row.compared.differing) for row in rows):
        total = sum(row.compared.rollouts for row in rows)
        console.print(
            f"[bold red]{differing} of {total} rollouts differ from plain decoding[/]: that is "
            "an engine bug; please report it"
        )
    best = max(rows, key=lambda row: row.compared.times.interval()[0])
    line = best.compared.line(row.compared for row in rows)
    together = "1 request" if best.width == 1 else f"{best.width} requests together"
    doubt = "" if best.compared.times.verdict is SpeedupVerdict.PAYS else ", no certain speedup"
    console.print(
        f"{line} ({kind}, temperature {best.temperature:g}, {together}){doubt}",
        highlight=False,
        soft_wrap=True,
    )


def _as_json(row: ComparedRow, config: RunConfig) -> dict[str, object]:
    compared = row.compared
    low, high = compared.times.interval()
    return {
        "spec": _kind(config),
        "temperature": row.temperature,
        "width": row.width,
        "pairs": len(compared.times),
        "rollouts": compared.rollouts,
        "differing": len(compared.differing),
        "accept_length": compared.accept_length,
        "tokens_per_second": compared.tokens_per_second,
        "speedup": compared.times.speedup,
        "low": low if math.isfinite(high) else None,
        "high": high if math.isfinite(high) else None,
        "verdict": compared.times.verdict.value,
    }
