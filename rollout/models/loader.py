"""Loads a model from a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType

import torch

from rollout.config import DType, LoadFormat
from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Checkpoint, Progress
from rollout.models.deepseek_config import FAMILY
from rollout.models.gemma import Gemma
from rollout.models.gpt_oss import GptOss
from rollout.models.granite import Granite, SharedGranite
from rollout.models.hybrid import Hybrid
from rollout.models.hybrid_config import HYBRIDS
from rollout.models.layers.weight_factory import WeightFactory
from rollout.models.olmo import Olmo
from rollout.models.phi import Phi
from rollout.models.pulled_folder import pulls_held_off
from rollout.models.spec import ModelSpec
from rollout.parallel import ONE_RANK, ModelRanks

MODEL_CLASSES: Mapping[str, type[CausalLM]] = MappingProxyType(
    {
        "LlamaForCausalLM": CausalLM,
        "MistralForCausalLM": CausalLM,
        "MinistralForCausalLM": CausalLM,
        "Qwen2ForCausalLM": CausalLM,
        "Qwen3ForCausalLM": CausalLM,
        "Qwen3MoeForCausalLM": CausalLM,
        "MiMoForCausalLM": CausalLM,
        "SmolLM3ForCausalLM": CausalLM,
        "Phi3ForCausalLM": Phi,
        "Olmo2ForCausalLM": Olmo,
        "Olmo3ForCausalLM": Olmo,
        "GptOssForCausalLM": GptOss,
        "Gemma2ForCausalLM": Gemma,
        "Gemma3ForCausalLM": Gemma,
        "GraniteForCausalLM": Granite,
        "GraniteMoeHybridForCausalLM": SharedGranite,
        **dict.fromkeys(FAMILY, CausalLM),
        **dict.fromkeys(HYBRIDS, Hybrid),
    }
)


def load_model(
    path: str | Path,
    dtype: DType,
    device: torch.device,
    max_context_len: int | None = None,
    *,
    load_format: LoadFormat = LoadFormat.safetensors,
    packing: bool = True,
    ranks: ModelRanks = ONE_RANK,
    exact: bool = True,
    progress: Progress | None = None,
    region: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> CausalLM:
    """Read config.json and safetensors into a model that is ready to run.

    Tensors are copied and converted one by one from the mapped file: there is no second copy of the
    model. With ``LoadFormat.dummy`` no tensor is read and every weight is zero.

    Args:
        packing: whether CPU weights may be packed; False leaves them plain.
        ranks: each rank reads its part of every tensor.
        exact: see `WeightFactory`.
        region: in which weights are made, and nothing else.

    Raises CheckpointError for an incomplete, damaged or mismatching folder, UnsupportedModelError
    for a model that is not implemented, InvalidInputError for a ``max_context_len`` beyond the
    checkpoint's positions.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"model.path={str(path)!r}: no such folder")
    with pulls_held_off(folder):
        spec = ModelSpec.read(folder, max_context_len)
        checkpoint = Checkpoint(folder) if load_format is LoadFormat.safetensors else None
        stored = spec.dtype or (torch.bfloat16 if checkpoint is None else checkpoint.dtype)
        weights = WeightFactory(
            dtype=resolve_dtype(dtype, stored, device), device=device, packing=packing,
            ranks=ranks, exact=exact, region=region,
        )  # fmt: skip
        model = MODEL_CLASSES[spec.architecture](spec, weights)
        if checkpoint is None:
            _fill_with_zeros(model)
        else:
            read_into(model, checkpoint, progress)
    return model


def _fill_with_zeros(model: CausalLM) -> None:
    """Fill weights with zeros: uninitialised ones may be NaN, or slow denormals."""
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    for loader in model.weight_loaders().values():
        if loader.required:
            loader.write(zero.expand(loader.shape))
    model.finish_loading()


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The torch device of that name; ``auto`` is cuda if there is a GPU, else cpu.

    ``local_rank``: this process's rank on its host; cuda then means the GPU of that index. Raises
    InvalidInputError for an unknown name or a device that does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local_rank is not None:
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidInputError("model.device", name, "must be auto, cpu or cuda[:n]") from None
    available = torch.cuda.device_count() if device.type == "cuda" else int(device.type == "cpu")
    if (device.index or 0) >= available:
        raise InvalidInputError("model.device", name, f"there are {available} such devices here")
    # For torch cpu:0 differs from cpu, and tensors would be copied instead of shared.
    return torch.device("cpu") if device.type == "cpu" else device


def read_into(model: CausalLM, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Fill every tensor of a model, or raise CheckpointError before writing any.

    MTP heads and vision towers of the checkpoint are skipped.
    """
    names = {name: name for name in checkpoint.tensors if not model.spec.passes_over(name)}
    checkpoint.load_into(model.weight_loaders(), names, progress)
    model.finish_loading()


_FAST_ON_CPU = {
    torch.bfloat16: frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    torch.float16: frozenset({"avx512_fp16", "amx_fp16"}),
}


def resolve_dtype(requested: DType, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to compute in. `auto` is ``stored``, or float32 on a CPU without instructions for
    it."""
    if requested is not DType.auto:
        return getattr(torch, requested.value)
    if stored not in _FAST_ON_CPU:
        return torch.float32
    if device.type != "cpu":
        return stored
    return stored if cpu_features() & _FAST_ON_CPU[stored] else torch.float32


def cpu_features() -> frozenset[str]:
    """The words of /proc/cpuinfo, the CPU's features among them; empty without such a file."""
    cpuinfo = Path("/proc/cpuinfo")
    return frozenset(cpuinfo.read_text().split()) if cpuinfo.exists() else frozenset()
