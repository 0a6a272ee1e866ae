"""The `specrollout` command: Hydra composes the configuration, and nothing below sees Hydra.

The subcommands, `specrollout report` among them, read their own arguments and are none of Hydra's.
"""

from __future__ import annotations

import copy
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

import hydra
import rich
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from rollout.engine.specs import factory_of
from rollout.errors import InvalidInputError, RolloutError
from rollout.models.head_parts import check_shares
from rollout.models.spec import ModelSpec
from rollout.offline import JobResult, JobStatus, RunConfig, SweepTable, run_job
from rollout.parallel import is_launched

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
EXIT_SIGNAL = 128  # plus the signal's number, as shells do

# An OSError names its file: one that may not be read, a full disk.
FAILURES = (RolloutError, OmegaConfBaseException, OSError)

DEFAULT_OUTPUT = "rollouts.jsonl"


# Imported when asked for: the engine's packages know of no worker, and reports need no torch.
SUBCOMMANDS = {
    "report": "rollout.report.report:run_report",
    "serve": "rollout.server.command:run_serve",
    "train-draft": "spec_workers.draft_training.command:run_train_draft",
}


def main() -> None:
    """Run the command that ``sys.argv`` holds; ends the process."""
    former = signal.signal(signal.SIGTERM, _end)  # until something knows how to stop
    try:
        _run_command()
    finally:
        signal.signal(signal.SIGTERM, former)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Close what is open, a Ray for one, as Ctrl-C does."""
    sys.exit(EXIT_SIGNAL + number)


def _run_command() -> NoReturn:
    sys.argv = [_with_model_path(argument) for argument in sys.argv]
    if len(sys.argv) > 1 and sys.argv[1] in SUBCOMMANDS:
        sys.exit(_subcommand(SUBCOMMANDS[sys.argv[1]], sys.argv[2:]))
    if len(sys.argv) > 1 and sys.argv[1].replace("-", "").isidentifier() and sys.argv[1][0] != "-":
        _print_error(f"no command {sys.argv[1]!r}: {', '.join(SUBCOMMANDS)}, or KEY=VALUE ...")
        sys.exit(EXIT_BAD_INPUT)
    register_config_schema()
    command = _Command()

    # Hydra would print a traceback of its own and end with 1 whatever happened, and after the
    # first failure drop the rest of a sweep; so no error of ours reaches it.
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


@contextmanager
def _hydra_exit_code() -> Iterator[None]:
    """Hydra says what is wrong with a command line and ends with 1; bad input ends with 2."""
    try:
        yield
    except SystemExit as ended:
        sys.exit(EXIT_BAD_INPUT if ended.code == EXIT_ERROR else ended.code)


def register_config_schema() -> None:
    """Types and checks for conf/config.yaml, under the name by which its defaults list asks."""
    schema = OmegaConf.structured(RunConfig)
    # Each spec has options of its own: factory_of() knows them, and names those there are.
    OmegaConf.set_struct(schema.spec, False)
    ConfigStore.instance().store(name="run_schema", node=schema, provider="specrollout")


def _with_model_path(argument: str) -> str:
    """``model=FOLDER`` is short for ``model.path=FOLDER``: what holds a model, or has a slash.

    No option of the group has one, so that a folder which is not there is told as such.
    """
    name, _, folder = argument.partition("=")
    is_model = "/" in folder or Path(folder, "config.json").is_file()
    return f"model.path={folder}" if name == "model" and is_model else argument


def _subcommand(target: str, arguments: list[str]) -> int:
    """The exit code: what the function gives, or that of the error it raises."""
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
    """The jobs of one command: one, or those of a sweep one after the other."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.sweep = SweepTable()
        self._outputs: set[Path] = set()

    def run(self, config: DictConfig) -> None:
        result = None
        try:
            run_config = run_config_from(config)
            _launch_ranks(run_config)
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


def run_config_from(config: DictConfig) -> RunConfig:
    """The composed configuration as checked dataclasses. Raises InvalidInputError."""
    required = {"model.path": "model.path=my/model", "data.path": "data.path=prompts.jsonl"}
    for name in sorted(OmegaConf.missing_keys(config), reverse=True):
        example = f", for example {required[name]}" if name in required else ""
        raise InvalidInputError(name, None, f"must be given{example} (see specrollout --help)")
    if config.output.path is None:
        hydra_config = HydraConfig.get()
        sweeps = hydra_config.mode is RunMode.MULTIRUN
        folder = Path(hydra_config.runtime.output_dir) if sweeps else Path()
        config = copy.deepcopy(config)
        config.output.path = str(folder / DEFAULT_OUTPUT)
    return cast(RunConfig, OmegaConf.to_object(config))


def _launch_ranks(config: RunConfig) -> None:
    """Start this command anew under torchrun, where it needs several processes and is one.

    Does not return then. Raises InvalidInputError in a sweep, whose jobs share the process, and
    for a model that cannot be shared out among so many.
    """
    if config.parallel.size == 1 or is_launched():
        return
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        raise InvalidInputError(
            "parallel.size",
            config.parallel.size,
            "of a sweep: start it with torchrun -m rollout.cli",
        )
    check_shares(ModelSpec.read(Path(config.model.path)), config.parallel.size)
    launcher = [sys.executable, "-m", "rollout.parallel.launcher", str(config.parallel.size)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "rollout.cli", *sys.argv[1:]])


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
