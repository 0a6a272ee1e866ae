"""The `specrollout` command: Hydra composes the configuration, and nothing below sees Hydra.

Subcommands such as `specrollout report` parse their own arguments without Hydra.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import NoReturn

import hydra
import rich
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from rollout.engine.spmd import launch_ranks
from rollout.engine.worker import factory_of
from rollout.errors import InvalidInputError, RolloutError
from rollout.offline import JobResult, JobStatus, RunConfig, SweepTable, run_job
from rollout.offline.composition import register_run_schema, run_config_from
from rollout.parallel import is_launched

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_SIGNAL = 128  # plus the signal's number, as shells do

# An OSError names its file: one that may not be read, a full disk.
FAILURES = (RolloutError, OmegaConfBaseException, OSError)

DEFAULT_OUTPUT = "rollouts.jsonl"


# Imported on demand: the engine's packages import no worker, and reports need no torch.
SUBCOMMANDS = {
    "compare": "rollout.offline.compare.command:run_compare",
    "report": "rollout.report.report:run_report",
    "serve": "rollout.server.command:run_serve",
    "train-draft": "spec_workers.draft_training.command:run_train_draft",
}


def main() -> None:
    """Run the command line in `sys.argv`; exits by `sys.exit`."""
    former = signal.signal(signal.SIGTERM, _end)  # until a job installs its own handler
    try:
        _run_command()
    finally:
        signal.signal(signal.SIGTERM, former)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind as Ctrl-C does, so that open resources such as Ray are closed."""
    sys.exit(EXIT_SIGNAL + number)


def _run_command() -> NoReturn:
    sys.argv = [_with_model_path(argument) for argument in sys.argv]
    if len(sys.argv) > 1 and sys.argv[1] in SUBCOMMANDS:
        sys.exit(_subcommand(SUBCOMMANDS[sys.argv[1]], sys.argv[2:]))
    if len(sys.argv) > 1 and sys.argv[1].replace("-", "").isidentifier() and sys.argv[1][0] != "-":
        _print_error(_no_command(sys.argv[1]))
        sys.exit(EXIT_BAD_INPUT)
    if sys.argv[1:] == ["--version"]:
        print(f"specrollout {version('specrollout')}")
        sys.exit()
    register_run_schema()
    command = _Command()

    # On any exception Hydra would print its own traceback, exit with 1 and drop the rest of a
    # sweep, so `_Command.run` lets none of our errors through.
    @hydra.main(config_path="pkg://rollout.conf", config_name="config", version_base="1.3")
    def run(config: DictConfig) -> None:
        command.run(config)

    try:
        with _hydra_exit_code():
            run()
    except KeyboardInterrupt:  # outside generation: nothing to save
        sys.exit(EXIT_SIGNAL + 2)
    finally:
        command.sweep.print(rich.get_console())
    sys.exit(command.exit_code)


def _no_command(name: str) -> str:
    meant = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
    hint = f", did you mean {meant[0]}?" if meant else ":"
    return f"no command {name!r}{hint} {', '.join(SUBCOMMANDS)}, or KEY=VALUE ..."


@contextmanager
def _hydra_exit_code() -> Iterator[None]:
    """Hydra says what is wrong with a command line and ends with 1; bad input ends with 2."""
    try:
        yield
    except SystemExit as ended:
        sys.exit(EXIT_BAD_INPUT if ended.code == EXIT_ERROR else ended.code)


def _with_model_path(argument: str) -> str:
    """Expand ``model=FOLDER`` to ``model.path=FOLDER`` if FOLDER has a slash or a config.json.

    No option of the config group has a slash, so a missing folder is reported as a missing folder.
    """
    name, _, folder = argument.partition("=")
    is_model = "/" in folder or Path(folder, "config.json").is_file()
    return f"model.path={folder}" if name == "model" and is_model else argument


def _subcommand(target: str, arguments: list[str]) -> int:
    """Run ``module:function`` and return its exit code, or that of the error it raises."""
    module, _, name = target.partition(":")
    run = getattr(importlib.import_module(module), name)
    try:
        with _hydra_exit_code():
            return run(arguments) or 0
    except FAILURES as error:
        return _report(error)
    except KeyboardInterrupt:  # before it was ready to end well
        return EXIT_SIGNAL + 2


class _Command:
    """Runs the jobs of one command one after another: a single job, or those of a sweep."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.sweep = SweepTable()
        self._outputs: set[Path] = set()

    def run(self, config: DictConfig) -> None:
        result = None
        try:
            run_config = run_config_from(config)
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                _refuse_ranks(run_config)
            launch_ranks(run_config.engine, sys.argv[1:])
            self._claim_output(run_config)
            result = run_job(run_config, factory_of(run_config.spec), rich.get_console())
        except FAILURES as error:
            code = _report(error)
            self.exit_code = self.exit_code or code
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                traceback.print_exc()
        self.sweep.add(HydraConfig.get().overrides.task, result)
        if result is not None and result.status is JobStatus.STOPPED:
            _stop(result)

    def _claim_output(self, config: RunConfig) -> None:
        assert config.output.path is not None, "run_config_from() gave a default"
        path = Path(config.output.path).resolve()
        if path in self._outputs:
            raise InvalidInputError(
                "output.path",
                config.output.path,
                "another job of this sweep wrote it: leave it out, for one file per job, or make "
                "it differ, as in output.path='runs/${hydra:job.num}.jsonl'",
            )
        self._outputs.add(path)


def _refuse_ranks(config: RunConfig) -> None:
    """Raises InvalidInputError for a sweep that would start ranks: its jobs share the process."""
    if config.parallel.size > 1 and not is_launched():
        raise InvalidInputError(
            "parallel.size",
            config.parallel.size,
            "a sweep cannot start ranks: run it with torchrun -m rollout.cli",
        )


def _stop(result: JobResult) -> None:
    assert result.signal is not None
    assert result.summary is not None
    done = result.summary.rollouts + result.summary.resumed
    rich.print(
        f"stopped by {result.signal.name} with {done} rollouts written: run the same command again "
        "to go on",
    )
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
