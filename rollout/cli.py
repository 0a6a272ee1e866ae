"""The `specrollout` command: Hydra composes the configuration, and nothing below sees Hydra.

Subcommands such as `specrollout report` parse their own arguments without Hydra.
"""

from __future__ import annotations

import importlib
import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import rich
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from rollout import __version__
from rollout.engine.spmd import launch_ranks
from rollout.engine.worker_factory import factory_of
from rollout.errors import InvalidInputError, RolloutError
from rollout.offline import JobResult, JobStatus, RunConfig, SweepTable, run_job
from rollout.offline.hydra_config import checked_config, register_schema, run_hydra
from rollout.parallel import is_launched
from rollout.validation import did_you_mean

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_SIGNAL = 128  # plus the signal's number, as shells do
EXIT_OUTPUT = os.EX_IOERR  # standard output takes no more; Hydra ends with EXIT_ERROR itself

# An OSError names its file: one that may not be read, a full disk.
FAILURES = (RolloutError, OmegaConfBaseException, OSError)

DEFAULT_OUTPUT = "rollouts.jsonl"


# Imported on demand: the engine's packages import no worker, and reports need no torch.
SUBCOMMANDS = {
    "compare": "rollout.offline.compare.command:run_compare",
    "mismatch": "rollout.trainers.mismatch.command:run_mismatch",
    "report": "rollout.report.report:run_report",
    "serve": "rollout.server.command:run_serve",
    "train-draft": "spec_workers.draft_training.command:run_train_draft",
}


class _Pipe(io.FileIO):
    """Standard output. Where it takes no more, the command ends.

    Whoever reads it may leave early, as `head` does: the command then exits silently with
    SIGPIPE's exit code, as shells have it. The signal itself stays ignored, for it would also end a
    server whose client leaves.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            with open(os.devnull, "wb") as nothing:  # for what is still buffered
                os.dup2(nothing.fileno(), self.fileno())
            if isinstance(error, BrokenPipeError):
                sys.exit(EXIT_SIGNAL + signal.SIGPIPE)
            _print_error(f"standard output cannot be written: {error.strerror}")
            sys.exit(EXIT_OUTPUT)


def main() -> None:
    """Run the command line in `sys.argv`; exits by `sys.exit`."""
    former = signal.signal(signal.SIGTERM, _end)  # until a job installs its own handler
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: a file that is opened next would get its number
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out is sys.__stdout__:
        unbuffered = out.write_through
        pipe = _Pipe(out.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(pipe),
            encoding=out.encoding,
            errors="backslashreplace" if out.errors == "strict" else out.errors,
            line_buffering=out.line_buffering,
            write_through=unbuffered,
        )
    try:
        _run_command()
    finally:
        signal.signal(signal.SIGTERM, former)
        sys.stdout.flush()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind as Ctrl-C does, so that open resources such as Ray are closed."""
    sys.exit(EXIT_SIGNAL + number)


def _run_command() -> NoReturn:
    arguments = sys.argv[1:]
    first = arguments[0] if arguments else ""
    if first in SUBCOMMANDS:
        sys.exit(_subcommand(SUBCOMMANDS[first], arguments[1:]))
    if first[:1] != "-" and first.replace("-", "").isidentifier() and not Path(first).is_dir():
        _print_error(_no_command(first))
        sys.exit(EXIT_BAD_INPUT)
    if arguments == ["--version"]:
        print(f"specrollout {__version__}")
        sys.exit()
    register_schema("run_schema", RunConfig)
    command = _Command(arguments)
    try:
        # An exception would end a sweep, so `_Command.run` lets none of our errors through.
        run_hydra("config", RunConfig, arguments, command.run)
    except InvalidInputError as error:
        sys.exit(_report(error))
    except KeyboardInterrupt:  # outside generation: nothing to save
        sys.exit(EXIT_SIGNAL + 2)
    finally:
        command.sweep.print(rich.get_console())
    sys.exit(command.exit_code)


def _no_command(name: str) -> str:
    hint = did_you_mean(name, SUBCOMMANDS) or ":"
    return f"no command {name!r}{hint} {', '.join(SUBCOMMANDS)}, or MODEL PROMPTS ..."


def _subcommand(target: str, arguments: list[str]) -> int:
    """Run ``module:function`` and return its exit code, or that of the error it raises."""
    module, _, name = target.partition(":")
    run = getattr(importlib.import_module(module), name)
    try:
        return run(arguments) or 0
    except FAILURES as error:
        return _report(error)
    except KeyboardInterrupt:  # before it was ready to end well
        return EXIT_SIGNAL + 2


class _Command:
    """Runs the jobs of one command one after another: a single job, or those of a sweep."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self.exit_code = 0
        self.sweep = SweepTable()
        self._outputs: set[Path] = set()

    def run(self, config: DictConfig) -> None:
        result = None
        try:
            run_config = checked_config(config, RunConfig, "specrollout")
            _choose_output(run_config)
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                _refuse_ranks(run_config)
            launch_ranks(run_config.ranks, run_config.model, self._arguments)
            self._claim_output(run_config)
            result = run_job(run_config, factory_of(run_config.spec), rich.get_console())
        except FAILURES as error:
            code = _report(error)
            self.exit_code = self.exit_code or code
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
        self.sweep.add(HydraConfig.get().overrides.task, result)
        if result is not None and result.status is JobStatus.STOPPED:
            _stop(result, self._arguments)

    def _claim_output(self, config: RunConfig) -> None:
        assert config.output.path is not None, "_choose_output() gave a default"
        path = Path(config.output.path).resolve()
        if path in self._outputs:
            raise InvalidInputError(
                "output.path",
                config.output.path,
                "another job of this sweep wrote it: leave it out, for one file per job, or make "
                "it differ, as in output.path='runs/${hydra:job.num}.jsonl'",
            )
        self._outputs.add(path)


def _choose_output(config: RunConfig) -> None:
    """Default ``output.path``: here, or in the folder of its own that a sweep gives each job."""
    if config.output.path is None:
        hydra_config = HydraConfig.get()
        sweeps = hydra_config.mode is RunMode.MULTIRUN
        folder = Path(hydra_config.runtime.output_dir) if sweeps else Path()
        config.output.path = str(folder / DEFAULT_OUTPUT)


def _refuse_ranks(config: RunConfig) -> None:
    """Raises InvalidInputError for a sweep that would start ranks: its jobs share the process."""
    if config.ranks.size > 1 and not is_launched():
        raise InvalidInputError(
            "parallel.size",
            config.parallel.size,
            "a sweep cannot start ranks: run it with torchrun -m rollout.cli",
        )


def _stop(result: JobResult, arguments: Sequence[str]) -> None:
    assert result.signal is not None
    assert result.summary is not None
    done = result.summary.rollouts + result.summary.resumed
    command = ["specrollout", *arguments]
    hydra_config = HydraConfig.get()
    sweeps = hydra_config.mode is RunMode.MULTIRUN
    if sweeps and not any(each.startswith("hydra.sweep.dir=") for each in command):
        command.append(f"hydra.sweep.dir={hydra_config.sweep.dir}")  # else it is new each time
    where = result.summary.output
    rich.get_console().print(
        f"stopped by {result.signal.name}: {done} rollouts are in {where}. The same command goes "
        f"on from there:\n{shlex.join(command)}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    sys.exit(EXIT_SIGNAL + result.signal)


def _report(error: Exception) -> int:
    """Print the error; the exit code for it."""
    _print_error(str(error))
    is_input = isinstance(error, (InvalidInputError, OmegaConfBaseException))
    return EXIT_BAD_INPUT if is_input else EXIT_ERROR


def _print_error(message: str) -> None:
    Console(stderr=True).print(
        f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    main()
