"""Engine configuration: plain dataclasses, checked when made, never written to afterwards.

Sizes that depend on the machine or the model (KV slots, dtype, device) live in the objects built
from these, not here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from rollout.errors import InvalidInputError


class DType(enum.StrEnum):
    """Names as a user writes them: OmegaConf matches names, not values."""

    auto = "auto"  # the checkpoint's, unless the device is slow in it
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LoadFormat(enum.StrEnum):
    """Where an engine's first weights come from. Names as vLLM and SGLang have them."""

    safetensors = "safetensors"  # the model folder
    dummy = "dummy"  # nowhere: a trainer sends all of them before the first token


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str  # a folder with config.json and safetensors
    load_format: LoadFormat = LoadFormat.safetensors  # dummy needs config.json alone
    tokenizer: str | None = None  # a folder; default: the model's own
    dtype: DType = DType.auto
    device: str = "auto"  # cuda if there is one, else cpu
    max_context_len: int | None = None  # tokens; default: the checkpoint's limit
    record_routes: bool = False  # keep which experts each cached token went to

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, DType):
            try:  # a name, or a torch.dtype
                self.dtype = DType(str(self.dtype).removeprefix("torch."))
            except ValueError:
                names = ", ".join(d.value for d in DType)
                raise InvalidInputError("model.dtype", self.dtype, f"one of {names}") from None
        if not isinstance(self.load_format, LoadFormat):
            try:
                self.load_format = LoadFormat(self.load_format)
            except ValueError:
                names = ", ".join(LoadFormat)
                raise InvalidInputError(
                    "model.load_format", self.load_format, f"one of {names}"
                ) from None
        if self.max_context_len is not None and self.max_context_len < 2:
            raise InvalidInputError("model.max_context_len", self.max_context_len, "must be >= 2")


@dataclass(kw_only=True, slots=True)
class MemoryConfig:
    kv_bytes: int | None = None  # bytes for KV and states; default: a share of free memory
    kv_fraction: float = 0.5  # that share, when kv_bytes is not given
    # Upper bound on slots, whatever the bytes allow. Default: 262,144 on a CPU, 4,194,304 on a GPU.
    max_kv_tokens: int | None = None
    prefix_cache: bool = True
    # Of targets with recurrent layers. A state slot holds the state of one prefix: two for each
    # running request, the others for draft nodes and for prefixes in the prefix cache. Default:
    # 2 * (max_running + 1), and 10 * max_running more as far as half of the bytes hold them.
    state_slots: int | None = None
    state_interval: int = 512  # tokens of a prefill between states kept in the prefix cache
    graph_bytes: int = 1 << 30  # most that captured CUDA graphs may hold; 0: capture none
    graph_rows: int = 256  # query rows of the largest step that is captured

    def __post_init__(self) -> None:
        if self.kv_bytes is not None and self.kv_bytes <= 0:
            raise InvalidInputError("memory.kv_bytes", self.kv_bytes, "must be > 0 bytes")
        if not 0 < self.kv_fraction < 1:
            raise InvalidInputError("memory.kv_fraction", self.kv_fraction, "must be in (0, 1)")
        if self.max_kv_tokens is not None and self.max_kv_tokens < 2:
            raise InvalidInputError("memory.max_kv_tokens", self.max_kv_tokens, "must be >= 2")
        if self.state_slots is not None and self.state_slots < 2:
            raise InvalidInputError(
                "memory.state_slots", self.state_slots, "must be >= 2 for each request at a time"
            )
        if self.state_interval < 1:
            raise InvalidInputError(
                "memory.state_interval", self.state_interval, "must be >= 1 token"
            )
        if self.graph_bytes < 0:
            raise InvalidInputError("memory.graph_bytes", self.graph_bytes, "must be >= 0 bytes")
        if not 1 <= self.graph_rows <= 4096:
            raise InvalidInputError("memory.graph_rows", self.graph_rows, "must be in [1, 4096]")


class Overlap(enum.StrEnum):
    """Whether two halves of the running requests take turns, so that the host works for one while
    the device computes the other. Names as a user writes them: YAML takes on and off for booleans.
    """

    auto = "auto"  # on a GPU, while it is measured to be faster
    always = "always"
    never = "never"


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """Defaults suit the device: see `StepLimits`."""

    max_running: int | None = None  # requests decoded together: 32 on a CPU, up to 256 on a GPU
    # Query tokens of one step, draft nodes not counted: 512 on a CPU, up to 2,048 on a GPU, and as
    # many as may run.
    max_step_tokens: int | None = None
    chunk_len: int | None = None  # longest prefill chunk of one request in one step
    overlap: Overlap = Overlap.auto

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, Overlap):
            try:
                self.overlap = Overlap(self.overlap)
            except ValueError:
                names = ", ".join(Overlap)
                raise InvalidInputError(
                    "scheduler.overlap", self.overlap, f"must be one of {names}"
                ) from None
        for name in ("max_running", "max_step_tokens", "chunk_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidInputError(f"scheduler.{name}", value, "must be >= 1")
        running, tokens = self.max_running, self.max_step_tokens
        if running is not None and tokens is not None and tokens < running:
            raise InvalidInputError(
                "scheduler.max_step_tokens",
                tokens,
                f"must be >= max_running={running}: each running request needs one",
            )


class ParallelMode(enum.StrEnum):
    """Names as a user writes them."""

    none = "none"
    tensor = "tensor"  # ranks run the same requests, and each has a part of every weight
    lockstep = "lockstep"  # ranks have requests of their own, and a part of every MLP


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """Processes that run one model. Each makes the same calls to an engine of its own."""

    mode: ParallelMode = ParallelMode.none
    size: int = 1  # processes: as many as the launcher started
    timeout: float = 300.0  # seconds that a rank waits for the others before it gives up
    check: bool = False  # compare what ranks drafted and sampled, each step

    def __post_init__(self) -> None:
        if not isinstance(self.mode, ParallelMode):
            try:
                self.mode = ParallelMode(self.mode)
            except ValueError:
                names = ", ".join(ParallelMode)
                raise InvalidInputError("parallel.mode", self.mode, f"one of {names}") from None
        if self.size < 1 or (self.size > 1) != (self.mode is not ParallelMode.none):
            raise InvalidInputError(
                "parallel.size", self.size,
                f"must be {'1' if self.mode is ParallelMode.none else '2 or more'} "
                f"with parallel.mode={self.mode}",
            )  # fmt: skip
        if not 0 < self.timeout < 1e6:
            raise InvalidInputError("parallel.timeout", self.timeout, "must be seconds > 0")


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    model: ModelConfig
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    exact: bool = True  # bitwise the same whatever shares the batch and however it was reached
    num_threads: int | None = None  # CPU threads; default: torch's
