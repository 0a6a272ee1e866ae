"""From a model folder to a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rollout.config import DType, LoadFormat
from rollout.errors import CheckpointError, InvalidInputError
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Checkpoint, listed
from rollout.models.dtype import resolve_dtype
from rollout.models.layers.weight_loader import mismatches
from rollout.models.registry import MODEL_CLASSES
from rollout.models.spec import ModelSpec
from rollout.parallel import ONE_RANK, ModelRanks

Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all, after every tensor."""


def load_model(
    path: str | Path,
    dtype: DType,
    device: torch.device,
    max_context_len: int | None = None,
    *,
    load_format: LoadFormat = LoadFormat.safetensors,
    packing: bool = True,
    ranks: ModelRanks = ONE_RANK,
    progress: Progress | None = None,
) -> CausalLM:
    """Read config.json and safetensors into a model ready to run.

    Tensors go one by one from the mapped file to their place, converted on the way: there is no
    second copy of the model. ``packing=False`` keeps weights at stable addresses on the CPU too.
    With ``LoadFormat.dummy`` no tensor is read and every weight is zero.
    Of several ``ranks`` each reads its part of every tensor.

    Raises CheckpointError for an incomplete, damaged or mismatching folder, UnsupportedModelError
    for a model not implemented here, InvalidInputError for a ``max_context_len`` out of reach.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"model.path={str(path)!r}: no such folder")
    spec = ModelSpec.read(folder, max_context_len)
    checkpoint = Checkpoint(folder) if load_format is LoadFormat.safetensors else None
    stored = spec.dtype or (torch.bfloat16 if checkpoint is None else checkpoint.dtype)
    model = MODEL_CLASSES[spec.architecture](
        spec,
        dtype=resolve_dtype(dtype, stored, device),
        device=device,
        packing=packing,
        ranks=ranks,
    )
    if checkpoint is None:
        _fill_with_zeros(model)
    else:
        read_into(model, checkpoint, progress)
    return model


def _fill_with_zeros(model: CausalLM) -> None:
    """Fill weights with zeros: uninitialised ones may be NaN, and slow to calculate with."""
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    for loader in model.weight_loaders().values():
        if loader.required:
            loader.write(zero.expand(loader.shape))
    model.finish_loading()


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """``auto`` is cuda where there is one, else cpu. Raises InvalidInputError.

    ``local_rank``: of several processes on this host, each with a GPU of its own.
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
    # To torch cpu:0 is another device than cpu: tensors would be copied where arrays are shared.
    return torch.device("cpu") if device.type == "cpu" else device


def read_into(model: CausalLM, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Fill every tensor of a model, or raise CheckpointError before the first is touched.

    What else the checkpoint has, MTP heads and vision towers, is passed over.
    """
    weight_loaders = model.weight_loaders()
    shapes = {
        name: shape
        for name, shape in checkpoint.shapes().items()
        if not model.spec.passes_over(name)
    }
    problems = mismatches(weight_loaders, shapes)
    if problems:
        raise CheckpointError(f"{checkpoint.folder}: {listed(problems)}")
    total, done = sum(checkpoint.tensors[name].num_bytes for name in shapes), 0
    for name, tensor in checkpoint:
        if name not in shapes:
            continue
        weight_loaders[name].write(tensor)
        done += checkpoint.tensors[name].num_bytes
        if progress is not None:
            progress(done, total)
    model.finish_loading()
