"""Configuration of the dataset job, and the part of it that all commands share."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.cluster.config import ClusterConfig
from rollout.config import (
    EngineConfig,
    LoadFormat,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from rollout.errors import InvalidInputError
from rollout.hub import hub_repository
from rollout.types import SamplingParams

_OUTPUTS = (".jsonl", ".parquet")
_PROMPTS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")


class OnError(enum.StrEnum):
    """The treatment of rows that cannot be used. Members are lower case: configuration files name
    them."""

    stop = "stop"  # before any work, naming the broken rows
    skip = "skip"  # warn, count, go on


class ChatTemplateMode(enum.StrEnum):
    """Whether a prompt of text becomes a user message, put through the tokenizer's chat template.

    Chat messages always go through it, token ids never do.
    """

    auto = "auto"  # where there is a template, but for text that has its special tokens already
    always = "always"
    never = "never"  # text is taken as it stands, as base models want it


@dataclass(kw_only=True, slots=True)
class DataConfig:
    path: str  # .jsonl, .json, .parquet, .jsonl.gz, or a dataset: a folder, or ORG/NAME[@REVISION]
    name: str | None = None  # the configuration of a dataset that has several
    split: str | None = None  # of a dataset; default: train
    prompt_column: str | None = None  # default: the first of PROMPT_COLUMNS that a row has
    columns: list[str] | None = None  # carried through to the output; default: all others
    chat_template: ChatTemplateMode = ChatTemplateMode.auto
    limit: int | None = None  # rows at most
    on_error: OnError = OnError.stop

    def __post_init__(self) -> None:
        is_dataset = hub_repository(self.path) and not Path(self.path).is_file()
        if not (is_prompt_file(self.path) or is_dataset or Path(self.path).is_dir()):
            raise InvalidInputError(
                "data.path", self.path,
                f"must end in {', '.join(_PROMPTS)}, or be a dataset: a folder, or ORG/NAME on the "
                "hub",
            )  # fmt: skip
        if self.limit is not None and self.limit < 1:
            raise InvalidInputError("data.limit", self.limit, "must be >= 1 row")


@dataclass(kw_only=True, slots=True)
class OutputConfig:
    path: str | None = None  # .jsonl or .parquet; the caller of the job chooses a default
    overwrite: bool = False  # what is there, instead of going on with it or refusing
    prompt_ids: bool = False  # write the prompt's token ids too
    # Counters of speculation. They depend on timing and interruptions, the rest of a row does not.
    stats: bool = False
    sync_seconds: float = 1.0  # at most so much is lost to a power cut; to a kill, nothing
    # Between two saves of what drafts are made from, to <path>.corpus: at most so much of it is
    # lost to a kill. 0: neither saved nor read.
    corpus_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.path is not None and Path(self.path).suffix not in _OUTPUTS:
            raise InvalidInputError(
                "output.path", self.path, f"must end in {' or '.join(_OUTPUTS)}"
            )
        if not self.sync_seconds >= 0:
            raise InvalidInputError("output.sync_seconds", self.sync_seconds, "must be >= 0")
        if not self.corpus_seconds >= 0:
            raise InvalidInputError(
                "output.corpus_seconds", self.corpus_seconds, "must be >= 0; 0 is never"
            )


class Tracker(enum.StrEnum):
    """An experiment tracker, by the name of its package and of the extra that installs it."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    trackio = "trackio"
    mlflow = "mlflow"


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Logs of a run, and how often they are written."""

    # A file for the run's log, which `specrollout report` draws. auto: <output.path>.log
    jsonl: str | None = "auto"
    tracker: Tracker | None = None  # what gets the counters of steps too
    every: int = 1  # steps between two logged ones; rollouts are all logged
    seconds: float = 5.0  # between two progress lines where there is no terminal

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvalidInputError("log.every", self.every, "must be >= 1 step")
        if not self.seconds > 0:
            raise InvalidInputError("log.seconds", self.seconds, "must be > 0")
        if self.tracker is not None and find_spec(self.tracker) is None:
            remedy = f"is not installed: pip install 'specrollout[{self.tracker}]'"
            raise InvalidInputError("log.tracker", str(self.tracker), remedy)


@dataclass(kw_only=True, slots=True)
class CommandConfig:
    """The fields of every command that opens an engine, or a cluster of them."""

    model: ModelConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    spec: dict[str, Any] = field(default_factory=dict)  # _target_ builds the worker; its options
    exact: bool = True
    num_threads: int | None = None

    def __post_init__(self) -> None:
        self.cluster.check_with(self.parallel)

    @property
    def ranks(self) -> ParallelConfig:
        """The ranks of the command's own process; see `ClusterConfig.own_ranks`."""
        return self.cluster.own_ranks(self.parallel)

    @property
    def engine(self) -> EngineConfig:
        """The parts of it that make the engine."""
        return EngineConfig(
            model=self.model,
            memory=self.memory,
            scheduler=self.scheduler,
            parallel=self.parallel,
            exact=self.exact,
            num_threads=self.num_threads,
        )


@dataclass(kw_only=True, slots=True)
class RunConfig(CommandConfig):
    data: DataConfig
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: OutputConfig = field(default_factory=OutputConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.model.load_format is LoadFormat.dummy:
            raise InvalidInputError(
                "model.load_format",
                self.model.load_format.value,
                "must be safetensors: nobody sends weights to a dataset job",
            )
        CommandConfig.__post_init__(self)  # slots make the class anew: super() fails


def is_prompt_file(path: str) -> bool:
    """Whether a path of prompts is that of a file, and of no dataset."""
    return path.endswith(_PROMPTS) and not Path(path).is_dir()
