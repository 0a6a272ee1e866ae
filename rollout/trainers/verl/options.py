"""The rollout options of verl's configuration: taken over, of no effect, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.config import EngineConfig, engine_config
from rollout.engine.worker_factory import WorkerFactory, worker_factory
from rollout.errors import InvalidInputError, UnknownOptionError
from rollout.hub import model_folder
from rollout.trainers.tensor_parallel import tensor_parallel
from rollout.trainers.verl.sampling import ResponseLimits
from rollout.validation import checked_flag

NAME = "specrollout"
_FIELD = "actor_rollout_ref.rollout"
OWN = f"{_FIELD}.engine_kwargs.{NAME}"
SIZE = f"{_FIELD}.tensor_model_parallel_size"


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The name of the replica's Ray actor."""
    return f"{NAME}_server_{replica_rank}{suffix}"


_Check = Callable[[Any], bool]


def _is_one(value: Any) -> bool:
    return value in (None, 1)


def _is_off(value: Any) -> bool:
    """Whether a value is nothing, an empty mapping, or a section whose switch is off."""
    if not value:
        return True
    read = value.get if isinstance(value, Mapping) else lambda name: getattr(value, name, None)
    switches = [read("enable"), read("enabled")]
    return switches != [None, None] and not any(switches)


REFUSED: Mapping[str, tuple[_Check, str]] = {
    "pipeline_model_parallel_size": (_is_one, "must be 1: a model is split by "
                                              "tensor_model_parallel_size alone"),
    "data_parallel_size": (_is_one, "must be 1: verl starts as many replicas as find room"),
    "expert_parallel_size": (_is_one, "must be 1: experts are split by tensor_model_parallel_size"),
    "moe_tensor_parallel_size": (_is_one, "must be 1: experts are split by "
                                          "tensor_model_parallel_size"),
    "cudagraph_capture_sizes": (_is_off, "must be null: specrollout captures graphs by "
                                           "itself, see memory.graph_rows"),
    "over_sample_rate": (_is_off, "must be 0: ending stragglers early is not offered"),
    "repetition_penalty": (_is_one, "must be 1.0: verl sends 1.0 with every request"),
    "scheduling_policy": (lambda policy: policy in (None, "fcfs"),
                          "must be fcfs: requests have no priorities"),
    "limit_images": (_is_off, "must be null: specrollout serves text models"),
    "quantization": (_is_off, "must be null: specrollout has no quantized models"),
    "quantization_config_file": (_is_off, "must be null: specrollout has no quantized models"),
    "qat": (_is_off, "must be off: specrollout has no quantized models"),
    "mtp": (_is_off, "must be off: specrollout's own speculation is chosen by "
                     f"+{OWN}.spec=ngram"),
    "prometheus": (_is_off, "must be off: the servers have no HTTP endpoint to scrape"),
    "profiler": (_is_off, f"must be off: {_FIELD}.profiler.enable=False"),
    "disaggregation": (_is_off, "must be off"),
}  # fmt: skip
"""Fields of verl's RolloutConfig with a test of what can be accepted, and the remedy."""

_LOGPROBS_MODES = {"processed_logprobs": False, "raw_logprobs": True}
_LOAD_FORMATS = ("dummy", "auto", "safetensors")
_HARMLESS_OVERRIDES = frozenset({"attn_implementation", "attention_dropout", "use_cache"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """All a server needs to know; travels to it by Ray."""

    model_path: str
    spec: str  # a name in conf/spec
    spec_options: Mapping[str, Any]
    engine: Mapping[str, Any]  # overrides of EngineConfig's fields
    limits: ResponseLimits
    run_seed: int
    ignore_eos: bool
    raw_logprobs: bool  # report the model's own instead of those the trainer recomputes
    routed_experts: bool  # report which experts each token went to, for the trainer to replay
    stop_token_ids: tuple[int, ...]
    weights_come_first: bool  # serve nothing before the trainer's first update
    frees_memory: bool  # while the trainer steps
    keeps_weights: bool  # over sleep, in a copy

    def engine_config(self) -> EngineConfig:
        """The configuration of the server's engine. Raises InvalidInputError."""
        try:
            return engine_config(self.model_path, dict(self.engine))
        except UnknownOptionError as error:
            remedy = f"{error.remedy}, spec, spec_options, sleep_level, exact_training, cuda_ipc"
            raise InvalidInputError(f"{OWN}.{error.field}", error.value, remedy) from None

    def worker_factory(self) -> WorkerFactory:
        """The factory of the engine's worker. Raises InvalidInputError."""
        return worker_factory(self.spec, **self.spec_options)


def server_options(
    rollout: Any, model: Any, own: Mapping[str, Any], *, standalone: bool
) -> ServerOptions:
    """The server's options from verl's RolloutConfig and HFModelConfig.

    ``own``: ``engine_kwargs.specrollout`` as plain containers. Raises InvalidInputError naming the
    field for whatever cannot be honoured.
    """
    for name, (accepts, remedy) in REFUSED.items():
        value = getattr(rollout, name, None)
        if not accepts(value):
            raise InvalidInputError(f"{_FIELD}.{name}", value, remedy)
    _one_of("logprobs_mode", rollout.logprobs_mode, tuple(_LOGPROBS_MODES))
    _one_of("load_format", rollout.load_format, _LOAD_FORMATS)
    backend = rollout.checkpoint_engine.backend
    if backend == "delta_sharded":
        remedy = "sends parts of tensors; choose naive, nccl or another that sends whole ones"
        raise InvalidInputError(f"{_FIELD}.checkpoint_engine.backend", backend, remedy)
    sends_adapters = _sends_adapters(model)
    if sends_adapters and backend != "naive":
        remedy = "sends adapters' bases alone; choose naive, or have adapters merged: " + _MERGE
        raise InvalidInputError(f"{_FIELD}.checkpoint_engine.backend", backend, remedy)
    _refuse_overrides(model)

    own = dict(own)
    if "parallel" in own:
        raise InvalidInputError(f"{OWN}.parallel", own["parallel"], f"is set by {SIZE}")
    spec, spec_options = own.pop("spec", "ngram"), own.pop("spec_options", None) or {}
    sleep_level = own.pop("sleep_level", 2)
    for name in ("exact_training", "cuda_ipc"):  # of the workers
        checked_flag(own.pop(name, False), f"{OWN}.{name}")
    if sleep_level not in (1, 2):
        remedy = "1 keeps the weights in a copy, 2 drops them until the next update"
        raise InvalidInputError(f"{OWN}.sleep_level", sleep_level, remedy)
    fraction = rollout.gpu_memory_utilization
    if standalone and rollout.standalone_gpu_memory_utilization is not None:
        fraction = rollout.standalone_gpu_memory_utilization
    replays = bool(getattr(rollout, "enable_rollout_routing_replay", False))
    folder = model_folder(model.local_path, "actor_rollout_ref.model.path")
    engine = {
        "tokenizer": model.local_tokenizer_path,
        "dtype": rollout.dtype,
        "kv_fraction": fraction,
        "max_running": rollout.max_num_seqs,
        "max_step_tokens": rollout.max_num_batched_tokens,
        "max_context_len": rollout.max_model_len,
        "prefix_cache": rollout.enable_prefix_caching,
        "record_routes": replays,
        **tensor_parallel(rollout.tensor_model_parallel_size, folder, SIZE),
    } | own
    eos = getattr(model.tokenizer, "eos_token_id", None)
    options = ServerOptions(
        model_path=model.local_path,
        spec=spec,
        spec_options=spec_options,
        engine=engine,
        limits=ResponseLimits(
            prompt_length=rollout.prompt_length, response_length=rollout.response_length
        ),
        run_seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
        raw_logprobs=_LOGPROBS_MODES[rollout.logprobs_mode],
        routed_experts=replays,
        stop_token_ids=() if eos is None else (eos,),
        weights_come_first=rollout.load_format == "dummy",
        frees_memory=rollout.free_cache_engine and rollout.enable_sleep_mode,
        keeps_weights=sleep_level == 1 or sends_adapters,
    )
    options.engine_config()  # both raise what the server would
    options.worker_factory()
    return options


_MERGE = "+actor_rollout_ref.model.lora.merge=True"


def _sends_adapters(model: Any) -> bool:
    """Whether updates bring LoRA adapters without their weights."""
    lora = model.lora or {}
    return bool(model.lora_rank or lora.get("rank", 0)) and not lora.get("merge", False)


def _refuse_overrides(model: Any) -> None:
    overrides = model.override_config.get("model_config", model.override_config)
    for name, value in overrides.items():
        if name not in _HARMLESS_OVERRIDES:
            raise InvalidInputError(
                f"actor_rollout_ref.model.override_config.{name}", value,
                "changes the trainer's model alone; write it into the checkpoint's config.json",
            )  # fmt: skip


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidInputError(f"{_FIELD}.{name}", value, f"one of {', '.join(known)}")
