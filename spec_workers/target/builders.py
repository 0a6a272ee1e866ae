"""The parts of a target worker that several ranks must agree on, in the order they are built."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch

from rollout.config import EngineConfig, LoadFormat
from rollout.models.causal_lm import CausalLM
from rollout.models.checkpoint import Progress
from rollout.models.layers.linear import sum_in_float32
from rollout.models.layers.row_invariance import check_outputs, make_row_invariant
from rollout.models.loader import load_model
from rollout.ops import gpu
from rollout.parallel.model_ranks import ModelRanks
from rollout.runner.memory_regions import MemoryRegions
from rollout.scheduler.step_limits import StepLimits
from rollout.types import MemoryTag
from rollout.weights.transaction import WeightTransaction

_QUICKEST_ROWS = 4
"""The fewest rows of a step, padding included, that oneDNN multiplies. Its products of fewer are
slower: with the demo model in bf16 a step of one row took 16.0 ms, a step of four 14.2."""


def open_model(
    config: EngineConfig,
    device: torch.device,
    ranks: ModelRanks,
    regions: MemoryRegions,
    progress: Progress | None,
) -> CausalLM:
    """This rank's part of the target, on ``device``, and its weights in their region. Raises what
    `load_model` does."""
    model = config.model
    return load_model(
        model.path,
        model.dtype,
        device,
        model.max_context_len,
        load_format=model.load_format,
        ranks=ranks,
        exact=config.exact,
        progress=progress,
        region=partial(regions.region, MemoryTag.WEIGHTS),
    )


def open_weights(config: EngineConfig, model: CausalLM, ranks: ModelRanks) -> WeightTransaction:
    """The transaction over the target's weights; torn until the first update where none were
    loaded."""
    weights = WeightTransaction(
        {"target": model}, passes_over=model.spec.passes_over, ranks=ranks.all
    )
    if config.model.load_format is LoadFormat.dummy:
        weights.tear(["target"], "model.load_format=dummy loads none")
    return weights


def agreed_limits(config: EngineConfig, model: CausalLM, ranks: ModelRanks) -> StepLimits:
    """The limits of a step: the least of all ranks, which may have GPUs of several sizes."""
    own = StepLimits.of(
        config.scheduler,
        gpu.total_bytes(model.device),
        recurrent=model.spec.linear_attention is not None,
    )
    return StepLimits(
        **{name: min(ranks.all.all_gather_int(each)) for name, each in asdict(own).items()}
    )


def agreed_minimum_rows(
    config: EngineConfig, model: CausalLM, ranks: ModelRanks, longest_step: int
) -> int:
    """The rows that shorter steps are padded to: the most that any rank's processor wants.

    With ``config.exact`` the products become row-invariant. ``longest_step``: rows of the largest
    step.
    """
    linears, exact_rows, quickest_rows = model.linears(), 1, 1
    if config.exact:
        exact_rows = make_row_invariant(linears, longest_step * ranks.rows.size)
        if ranks.all.size > 1:
            check_outputs(linears)
    elif model.device.type == "cuda":
        sum_in_float32()
    if model.device.type == "cpu" and not all(each.multiplies_few_rows for each in linears):
        quickest_rows = _QUICKEST_ROWS
    return max(ranks.all.all_gather_int(max(exact_rows, quickest_rows)))
