"""`specrollout compare`: does speculation pay for this model, these prompts and this machine?"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

import rich
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from rich.console import Console

from rollout.cluster.config import ClusterKind
from rollout.engine.durable_files import whole_file
from rollout.engine.engine import RolloutEngine
from rollout.engine.worker_factory import WorkerFactory, factory_of
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
from rollout.offline.prompt_tokens import check_tokens
from rollout.offline.prompts import PromptFile
from rollout.types import Prompt

_WIDE = 1.1
"""An interval that holds 1 and goes up to this leaves open whether drafts pay."""

_RARE = 1.3
"""Accept lengths below are of outputs that rarely repeat."""

_SPARE = 3
"""Times the bytes of its weights that must be free for a second engine and its KV."""

_Number = TypeVar("_Number", int, float)

_EPILOG = """\
examples:
  specrollout compare model.path=my/model data.path=prompts.jsonl sampling.n=8
  specrollout compare spec=ngram,hybrid spec.draft_path=my/draft model.path=... data.path=...
  specrollout compare experiment=demo --widths 1,4,8 --temperatures 0.7,1.0

Each epoch samples every prompt sampling.n times, with new seeds. The last epoch is decoded with
and without drafts in turns, by two engines where the memory of a CPU holds them; earlier epochs
teach the drafts. spec.KEY=VALUE applies to the kinds that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The command's own arguments; the others are overrides of the job's configuration."""

    kinds: list[str]
    widths: list[int]
    temperatures: list[float] | None  # None: the job's
    epochs: int
    minutes: float  # of the compared epochs, all cells together
    json: Path | None
    overrides: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One row of the table."""

    kind: str
    temperature: float
    width: int
    compared: Compared


def run_compare(arguments: Sequence[str]) -> int:
    """Print a line for each kind, temperature and width. 1 where tokens or logprobs differ.

    Raises InvalidInputError, and what loading the model does.
    """
    options = compare_options(arguments)
    with hydra_errors(RunConfig, options.overrides):
        configs = [_config(options, kind) for kind in options.kinds]
    factories = [factory_of(config.spec) for config in configs]
    if options.json is not None:
        _check_json(options.json, configs)
    console = rich.get_console()
    num_cells = len(configs) * len(options.widths) * len(options.temperatures or [0])
    seconds = options.minutes * 60 / num_cells
    cells = []
    for kind, config, factory in zip(options.kinds, configs, factories, strict=True):
        for cell in _compare(kind, config, factory, options, seconds, console):
            console.print(f"{_name(cell)}: {cell.compared}", highlight=False, soft_wrap=True)
            cells.append(cell)
    _print_advice(cells, console)
    _print_result(cells, console)
    if options.json is not None:
        with whole_file(options.json) as file:
            file.write("".join(json.dumps(_row(cell)) + "\n" for cell in cells).encode())
    return 1 if any(cell.compared.differing for cell in cells) else 0


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
        help="a job's (specrollout --help): MODEL PROMPTS KEY=VALUE; several kinds: spec=KIND,KIND",
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
    overrides = [*words_as_overrides(given.overrides, RunConfig, flags), *flags]
    kinds = [each for each in overrides if each.startswith("spec=")]
    options = CompareOptions(
        kinds=kinds[-1].removeprefix("spec=").split(",") if kinds else ["ngram"],
        widths=_numbers("--widths", given.widths, int),
        temperatures=given.temperatures and _numbers("--temperatures", given.temperatures, float),
        epochs=given.epochs,
        minutes=given.minutes,
        json=given.json,
        overrides=[each for each in overrides if each not in kinds],
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


def _config(options: CompareOptions, kind: str) -> RunConfig:
    """The job's configuration with this kind of drafts, less options that only others have."""
    register_schema("run_schema", RunConfig)
    with initialize_config_module("rollout.conf", version_base="1.3"):
        known = {each: compose("config", overrides=[f"spec={each}"]) for each in options.kinds}
        others = [config for each, config in known.items() if each != kind]
        fitting = [
            override
            for override in options.overrides
            if _fits(override, known[kind]) or not any(_fits(override, each) for each in others)
        ]
        config = compose("config", overrides=[f"spec={kind}", *fitting])
    run_config = checked_config(config, RunConfig, "specrollout")
    if run_config.parallel.size > 1 or run_config.cluster.kind is not ClusterKind.none:
        raise InvalidInputError("parallel.size, cluster.kind", "", "compare runs one engine")
    if kind == "none":
        raise InvalidInputError("spec", kind, "is what the others are compared with")
    return run_config


def _check_json(path: Path, configs: Sequence[RunConfig]) -> None:
    """Raise InvalidInputError where the rows would replace what is read, or find no place."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidInputError("--json", str(path), "must name a file in a folder that exists")
    for config in configs:
        as_output = replace(config, output=replace(config.output, path=str(path)))
        JobPaths(as_output).require_unread("--json", path)


def _fits(override: str, config: DictConfig) -> bool:
    """Whether the kind of ``config`` has the option, if it is one of ``spec``."""
    key = override.lstrip("+~").partition("=")[0].split(".")
    return key[0] != "spec" or (len(key) > 1 and key[1] in config.spec)


def _compare(
    kind: str,
    config: RunConfig,
    factory: WorkerFactory,
    options: CompareOptions,
    seconds: float,
    console: Console,
) -> Iterator[ComparedRow]:
    """The rows of one kind, which share their engines. ``seconds``: of each row."""
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        file = PromptFile(config.data)
        checked = check_rows(file, config.data.on_error, folder / "none.jsonl", ())
        engines: list[RolloutEngine] = []
        while not engines or (len(engines) == 1 and _fits_again(engines[0])):
            with loading_model(console, config.model.path) as progress:
                engines.append(RolloutEngine.from_config(config.engine, factory, progress))
            at_end.callback(engines[-1].close)
        tokens = check_tokens(checked, engines[0], config)
        prompts: list[Prompt] = [token_ids.tolist() for token_ids in tokens]
        learns = engines[0].corpus_tokens is not None
        start, taught = folder / "start", folder / "taught"
        if learns:
            engines[0].save_corpus(start)
        for temperature in options.temperatures or [config.sampling.temperature]:
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
                work = Work(prompts=prompts, params=sampling, width=width)
                console.print(
                    f"comparing at temperature {temperature:g}, {width} at a time, for about "
                    f"{seconds:.0f} s"
                )
                compared = Comparison(*engines).run(work.of_epoch(options.epochs - 1), seconds)
                yield ComparedRow(
                    kind=kind, temperature=temperature, width=width, compared=compared
                )


def _fits_again(engine: RolloutEngine) -> bool:
    """Whether there is room for a second engine, beside which the first one is compared best.

    On a GPU, whose speed wanders less, one engine decodes by both sides.
    """
    device = engine.worker.model_device
    weights = sum(
        prod(loader.shape) * loader.dtype.itemsize
        for model in engine.worker.weights.parts.values()
        for loader in model.weight_loaders().values()
    )
    return device.type == "cpu" and free_bytes(device) > _SPARE * weights


def _name(cell: ComparedRow) -> str:
    together = "1 request" if cell.width == 1 else f"{cell.width} requests together"
    return f"{cell.kind}, temperature {cell.temperature:g}, {together}"


def _print_advice(cells: Sequence[ComparedRow], console: Console) -> None:
    differing = sum(len(cell.compared.differing) for cell in cells)
    rollouts = sum(cell.compared.rollouts for cell in cells)
    if differing:
        console.print(
            f"[bold red]{differing} of {rollouts} rollouts differ from plain decoding[/]: that is "
            "an engine bug; please report it"
        )
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        here = [cell for cell in cells if cell.temperature == temperature]
        console.print(advice(here), highlight=False, soft_wrap=True)


def advice(cells: Sequence[ComparedRow]) -> str:
    """Say whether drafts pay at the temperature that all ``cells`` have."""
    temperature = cells[0].temperature
    paying = [cell for cell in cells if cell.compared.times.verdict is SpeedupVerdict.PAYS]
    if paying:
        best = max(paying, key=lambda cell: cell.compared.times.interval()[0])
        widths = ", ".join(str(cell.width) for cell in paying if cell.kind == best.kind)
        return f"temperature {temperature:g}: spec={best.kind} pays with {widths} requests together"
    if any(cell.compared.times.interval()[1] >= _WIDE for cell in cells):
        return (
            f"Inconclusive at temperature {temperature:g}: raise --minutes, or use an idle machine"
        )
    rare = max(cell.compared.accept_length for cell in cells) < _RARE
    reason = ": outputs rarely repeat, so drafting stops" if rare else ""
    return f"No speedup at temperature {temperature:g}{reason}"


def _print_result(cells: Sequence[ComparedRow], console: Console) -> None:
    """The line that a reader should remember, of the row that gains most."""
    best = max(cells, key=lambda cell: cell.compared.times.interval()[0])
    line = best.compared.line(cell.compared for cell in cells)
    doubt = "" if best.compared.times.verdict is SpeedupVerdict.PAYS else ", no certain speedup"
    console.print(f"{line} ({_name(best)}){doubt}", highlight=False, soft_wrap=True)


def _row(cell: ComparedRow) -> dict[str, object]:
    compared = cell.compared
    low, high = compared.times.interval()
    return {
        "spec": cell.kind,
        "temperature": cell.temperature,
        "width": cell.width,
        "pairs": len(compared.times),
        "rollouts": compared.rollouts,
        "differing": len(compared.differing),
        "accept_length": compared.accept_length,
        "tokens_per_second": compared.tokens_per_second,
        "speedup": compared.times.speedup,
        "low": low,
        "high": high,
        "verdict": compared.times.verdict.value,
    }
