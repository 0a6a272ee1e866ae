"""Engine configuration: plain dataclasses, checked when made, never written to afterwards.

Sizes that depend on the machine or the model (KV slots, dtype, device) live in the objects built
from these, not here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from rollout.errors import InvalidInputError, UnknownOptionError
from rollout.hub import model_folder
from rollout.validation import (
    checked_flag,
    checked_int,
    checked_member,
    checked_name,
    checked_path,
    checked_seconds,
    did_you_mean,
)

KEY_OF: Mapping[str, str] = {
    "tokenizer_path": "model.tokenizer",  # SGLang's
    "max_model_len": "model.max_context_len",
    "context_length": "model.max_context_len",  # SGLang's
    "max_num_seqs": "scheduler.max_running",
    "max_running_requests": "scheduler.max_running",  # SGLang's
    "max_num_batched_tokens": "scheduler.max_step_tokens",
    "long_prefill_token_threshold": "scheduler.chunk_len",
    "chunked_prefill_size": "scheduler.chunk_len",  # SGLang's
    "gpu_memory_utilization": "memory.kv_fraction",
    "mem_fraction_static": "memory.kv_fraction",  # SGLang's
    "kv_cache_memory_bytes": "memory.kv_bytes",
    "enable_prefix_caching": "memory.prefix_cache",
}
"""vLLM's and SGLang's names of an engine's options, with the key that means the same."""


class DType(enum.StrEnum):
    """Names as a user writes them: OmegaConf matches names, not values."""

    auto = "auto"  # the checkpoint's, or float32 where the device is slow in that
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LoadFormat(enum.StrEnum):
    """The source of an engine's first weights. Names follow vLLM and SGLang."""

    safetensors = "safetensors"  # the model folder
    dummy = "dummy"  # nothing is read: a trainer sends all weights before the first token


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The model to run, its dtype and its device."""

    # A folder with config.json and safetensors. A name on the hub, ORG/NAME or ORG/NAME@REVISION,
    # becomes the folder of its snapshot.
    path: str
    load_format: LoadFormat = LoadFormat.safetensors  # dummy needs only config.json
    tokenizer: str | None = None  # a folder or a name on the hub; default: the model's own
    dtype: DType = DType.auto
    device: str = "auto"  # cuda if there is one, else cpu
    max_context_len: int | None = None  # tokens; default: the checkpoint's limit
    record_routes: bool = False  # store which experts each cached token went to

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):
            try:  # a name, or a torch.dtype
                self.dtype = DType(str(self.dtype).removeprefix("torch."))
            except (ValueError, RecursionError):
                names = ", ".join(d.value for d in DType)
                raise InvalidInputError("model.dtype", self.dtype, f"one of {names}") from None
        path = checked_path(self.path, "model.path")
        self.device = checked_name(self.device, "model.device")
        self.load_format = checked_member(self.load_format, "model.load_format", LoadFormat)
        self.record_routes = checked_flag(self.record_routes, "model.record_routes")
        _check_counts(self, "model", max_context_len=2)
        if self.tokenizer is not None:
            tokenizer = checked_path(self.tokenizer, "model.tokenizer")
            self.tokenizer = model_folder(tokenizer, "model.tokenizer", weights=False)
        has_weights = self.load_format is LoadFormat.safetensors
        self.path = model_folder(path, "model.path", weights=has_weights)


@dataclass(kw_only=True, slots=True)
class MemoryConfig:
    """Sizes of the KV cache, of recurrent states and of captured forwards."""

    kv_bytes: int | None = None  # bytes for KV and states; default: a share of free memory
    # Share of free memory when kv_bytes is None. Default: 0.5 on a CPU, which other programs use
    # too, and 0.85 on a GPU.
    kv_fraction: float | None = None
    # Upper bound on slots, whatever the bytes allow. Default: 262,144 on a CPU, 4,194,304 on a GPU.
    max_kv_tokens: int | None = None
    prefix_cache: bool = True
    # For targets with recurrent layers. A state slot holds the state of one prefix: two for each
    # running request, the rest for draft nodes and for prefixes in the prefix cache. Default:
    # 2 * (max_running + 1), plus up to 10 * max_running as far as half of the bytes hold them.
    state_slots: int | None = None
    state_interval: int = 512  # prefill tokens between states stored in the prefix cache
    # For targets with windows in some layers: slots of those layers, which give back what no window
    # will see again. 0: they store all tokens, as the others do. Default: see `window_sizes`.
    window_slots: int | None = None
    graph_bytes: int = 1 << 30  # upper bound for captured forwards; 0: capture none
    # Query rows of the largest step that is captured; on a CPU at most 128 with AMX, 48 with other
    # products of this package, 16 with torch's.
    graph_rows: int = 1024

    def __post_init__(self) -> None:
        fraction = self.kv_fraction
        if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction < 1):
            raise InvalidInputError("memory.kv_fraction", fraction, "must be in (0, 1)")
        self.prefix_cache = checked_flag(self.prefix_cache, "memory.prefix_cache")
        _check_counts(self, "memory", kv_bytes=1, max_kv_tokens=2, state_slots=2, window_slots=0)
        self.state_interval = checked_int(self.state_interval, "memory.state_interval", minimum=1)
        self.graph_bytes = checked_int(self.graph_bytes, "memory.graph_bytes")
        self.graph_rows = checked_int(self.graph_rows, "memory.graph_rows", minimum=1, maximum=4096)


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the requests in it. Defaults suit the device: see `StepLimits`."""

    max_running: int | None = None  # requests decoded together: 32 on a CPU, up to 256 on a GPU
    # Query tokens of one step, draft nodes not counted: 512 on a CPU, up to 2,048 on a GPU, and at
    # least max_running.
    max_step_tokens: int | None = None
    chunk_len: int | None = None  # longest prefill chunk of one request in one step

    def __post_init__(self) -> None:
        _check_counts(self, "scheduler", max_running=1, max_step_tokens=1, chunk_len=1)
        running, tokens = self.max_running, self.max_step_tokens
        if running is not None and tokens is not None and tokens < running:
            raise InvalidInputError(
                "scheduler.max_step_tokens",
                tokens,
                f"must be >= max_running={running}: each running request needs one",
            )


class ParallelMode(enum.StrEnum):
    """The ways in which several processes run one model."""

    none = "none"
    tensor = "tensor"  # ranks run the same requests; each has a part of every weight
    lockstep = "lockstep"  # ranks have their own requests; each has a part of every MLP


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Ranks that run one model. Of tensor-parallel ones the first leads, and the others follow."""

    mode: ParallelMode = ParallelMode.none
    size: int = 1  # processes: as many as the launcher started, or a divisor of them
    tensor_size: int = 1  # with lockstep: consecutive ranks that run the same requests
    timeout: float = 300.0  # seconds that a rank waits for the others before it gives up

    def __post_init__(self) -> None:
        self.mode = checked_member(self.mode, "parallel.mode", ParallelMode)
        self.size = checked_int(self.size, "parallel.size", minimum=1)
        self.tensor_size = checked_int(self.tensor_size, "parallel.tensor_size", minimum=1)
        self.timeout = checked_seconds(self.timeout, "parallel.timeout")
        if (self.size > 1) != (self.mode is not ParallelMode.none):
            raise InvalidInputError(
                "parallel.size", self.size,
                f"must be {'1' if self.mode is ParallelMode.none else '2 or more'} "
                f"with parallel.mode={self.mode}",
            )  # fmt: skip
        if self.tensor_size > 1 and (
            self.mode is not ParallelMode.lockstep or self.size % self.tensor_size
        ):
            raise InvalidInputError(
                "parallel.tensor_size", self.tensor_size,
                f"must divide parallel.size={self.size} and be 1 unless parallel.mode=lockstep",
            )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The parts of an engine's configuration."""

    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    exact: bool = True  # outputs are bitwise independent of batch, chunks, caches and drafts
    # CPU threads. Default: OMP_NUM_THREADS, or what torch.set_num_threads() set. Where neither was
    # given: torch's number, or fewer if forwards are clearly faster so as the engine starts.
    num_threads: int | None = None

    def __post_init__(self) -> None:
        self.exact = checked_flag(self.exact, "exact")
        if self.num_threads is not None:
            self.num_threads = checked_int(self.num_threads, "num_threads", minimum=1, maximum=4096)


def _check_counts(part: Any, section: str, **minimums: int) -> None:
    """Check integer fields that may be None, each with its minimum."""
    for name, lowest in minimums.items():
        if (value := getattr(part, name)) is not None:
            setattr(part, name, checked_int(value, f"{section}.{name}", minimum=lowest))


def engine_config(path: str, overrides: dict[str, Any]) -> EngineConfig:
    """The configuration for a model's folder. Each override sets a part's field of that name; names
    are unique across parts.

    ``parallel`` is a ParallelConfig, or a mapping of its fields.

    Raises InvalidInputError for a name no part has.
    """
    parts: dict[str, type] = {
        "model": ModelConfig,
        "memory": MemoryConfig,
        "scheduler": SchedulerConfig,
    }
    owner = {f.name: part for part, cls in parts.items() for f in fields(cls)}
    own = {f.name for f in fields(EngineConfig)} - parts.keys()
    chosen: dict[str, dict[str, Any]] = {part: {} for part in (*parts, "engine")}
    for name, value in overrides.items():
        if name in owner and name != "path":
            chosen[owner[name]][name] = value
        elif name in own:
            chosen["engine"][name] = value
        else:
            known = sorted((owner.keys() | own) - {"path"})
            ours = {theirs: key.rpartition(".")[2] for theirs, key in KEY_OF.items()}
            ours["tensor_parallel_size"] = "parallel"
            hint = did_you_mean(name, [*known, *ours], ours)
            remedy = f"unknown{hint}; there are {', '.join(known)}"
            raise UnknownOptionError(name, value, remedy)
    parallel = chosen["engine"].pop("parallel", {})
    if not isinstance(parallel, ParallelConfig):
        names = [f.name for f in fields(ParallelConfig)]
        if not isinstance(parallel, Mapping) or not set(parallel) <= set(names):
            raise InvalidInputError("parallel", parallel, f"must map some of {', '.join(names)}")
        parallel = ParallelConfig(**parallel)
    return EngineConfig(
        model=ModelConfig(path=str(path), **chosen["model"]),
        memory=MemoryConfig(**chosen["memory"]),
        scheduler=SchedulerConfig(**chosen["scheduler"]),
        parallel=parallel,
        **chosen["engine"],
    )
